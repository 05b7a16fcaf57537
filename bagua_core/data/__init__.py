"""Loads samples for the training script: each worker's share of the global batch, for any set of workers."""
