"""A job's events for people: their records, and how agents write them."""
