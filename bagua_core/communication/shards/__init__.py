"""Sums gradients of virtual shards in one fixed order, whatever the number of workers."""
