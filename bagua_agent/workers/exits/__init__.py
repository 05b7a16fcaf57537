"""Watches for the end of a worker's process, finds its cause, and ends workers."""
