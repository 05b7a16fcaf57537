"""The agent: one process per node and job. Never imports torch."""
