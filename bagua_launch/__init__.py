"""What a person types: the command line that prepares a job and hands it to the agent."""
