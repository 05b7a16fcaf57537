"""Why and when a worker's process ended, and ending it."""
