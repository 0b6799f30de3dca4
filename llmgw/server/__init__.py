"""The control plane daemon: fleet listener, controller, router workers."""
