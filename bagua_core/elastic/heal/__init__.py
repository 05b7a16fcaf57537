"""Copying the committed state from its holders to workers that lack it."""
