"""Provides hooks and helpers on the user's module: its buffers, the begin of backward, steps of optimizers."""
