"""Tuning of the settings of steps: what is measured, the study of a world, and its sampler."""
