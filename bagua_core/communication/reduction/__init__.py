"""Gradients on their way: buckets, the reducer and its thread."""
