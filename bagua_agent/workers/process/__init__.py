"""A worker's process: its account, its status, its channels to the agent."""
