An engine that answers its health check but makes no token of its requests is found out by asking for one, and is replaced; one that is busy is left alone.
