"""Contains service mode's decisions as pure functions: which job runs on which nodes, and which units a node runs for
that."""
