"""Checkpoints: the job's state on disk, used when every holder is lost."""
