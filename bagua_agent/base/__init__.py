"""Code that every part of the agent uses: errors, background operations, signals, timers, text."""
