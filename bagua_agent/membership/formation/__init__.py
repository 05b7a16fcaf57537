"""Decides which generation follows, from the job's condition and the workers that are ready. Without IO."""
