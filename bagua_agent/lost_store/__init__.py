"""What if the store lost the keys of a running job? The rule, and who acts on it."""
