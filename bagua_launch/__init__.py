"""The command line that prepares a job and passes it to the agent."""
