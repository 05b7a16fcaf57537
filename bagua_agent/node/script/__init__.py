"""What the text of a user's script says about how its workers start."""
