"""The package that holds fuse_optimizer in the original's later versions."""
