"""Who failed first, what it costs, and whether workers start again. Without IO."""
