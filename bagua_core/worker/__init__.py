"""The processes that an agent starts: the runner of scripts and the warm parent; also stack dumps and store hosts."""
