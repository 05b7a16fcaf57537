"""The daemon, a node's long-running service: its callers, its configuration and the units that it runs."""
