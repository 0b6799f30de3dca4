"""The words of llmgw as frozen values, the state machines of nodes and shards, and units. Pure."""
