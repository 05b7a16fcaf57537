"""Stores that scripts may use by themselves."""
