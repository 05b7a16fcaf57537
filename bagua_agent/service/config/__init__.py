"""The daemon's configuration file: its keys, their meaning and checks."""
