"""Collectives that a script calls outside the step, before the loop among them."""
