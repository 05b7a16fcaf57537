"""A node's part in its job: its workers, its own key, its end."""
