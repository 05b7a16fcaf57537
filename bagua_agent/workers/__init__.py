"""Processes of a node: how workers start, what they print, how they end and why."""
