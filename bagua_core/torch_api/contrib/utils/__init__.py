"""Provides stores that scripts may use by themselves."""
