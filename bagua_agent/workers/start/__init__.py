"""Starting workers: command, environment, NUMA binding, the warm parent they fork from."""
