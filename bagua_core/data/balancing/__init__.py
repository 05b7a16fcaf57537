"""Gives every worker the same amount of work in every step when the cost of samples differs."""
