"""One node's part in one job: its assembly, its loop, its end."""
