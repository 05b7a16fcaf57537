"""A worker's replica: the workers that hold one copy of a sharded model together."""
