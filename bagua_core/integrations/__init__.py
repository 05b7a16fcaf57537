"""Adapters of training frameworks. Each is imported by its own name, and imports its framework only then."""
