"""A node's long-running service, the daemon: who may ask it for what, how it is configured, what it runs."""
