"""Decides which generation follows, from offers, standings and losses. Without IO."""
