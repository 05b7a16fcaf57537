"""The reduction of gradients: buckets, the reducer and its thread."""
