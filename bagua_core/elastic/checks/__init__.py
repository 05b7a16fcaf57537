"""Comparison of replicas, and of the time that workers take."""
