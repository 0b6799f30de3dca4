"""The link between server and agents: messages, framing, TLS identity, link state."""
