Tokens per day hold over a stop of everything; a replica whose address refuses its own key is left out of the routing table.
