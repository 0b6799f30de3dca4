`llmgw key rotate NAME --overlap 24h` gives a key a new secret while the old one is still good; `llmgw key create --class high` sets its class.
