"""The node daemon: link client, supervisor, shim, probes, inventory."""
