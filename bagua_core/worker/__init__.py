"""What an agent starts: the runner of scripts, the warm parent, stacks on request, a worker's store."""
