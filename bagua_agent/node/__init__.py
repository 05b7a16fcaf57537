"""What does this node do for its job? Its workers, its own key, its end."""
