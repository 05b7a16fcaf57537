"""Predicts the time of a step, and the life of a job, on clusters that are larger than the lab (docs/scaling.md)."""
