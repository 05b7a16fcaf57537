"""Finds the first failure, what it costs, and whether workers start again. Without IO."""
