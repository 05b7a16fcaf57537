"""Which generation follows? Decided from offers, standings and losses, without IO."""
