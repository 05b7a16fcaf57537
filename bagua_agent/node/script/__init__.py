"""Finds out from the text of a user's script how its workers start."""
