"""The admin HTTP API on the server's unix socket."""
