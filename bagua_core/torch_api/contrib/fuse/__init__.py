"""As in the original's later versions."""
