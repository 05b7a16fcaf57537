"""The leader's state machine: (picture, event) -> (picture, actions), without IO."""
