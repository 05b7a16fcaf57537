"""Tracks the operation that this worker waits in, so that ranks that disagree can be named."""
