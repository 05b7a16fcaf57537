"""BaguaTensor does not exist here; asking for it says what to use (absent_names.py)."""
