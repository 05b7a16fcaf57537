"""Restores the keys of a running job after the store lost them."""
