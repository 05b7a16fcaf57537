"""What workers print: routing, prefixes, log files and their rotation, terminals."""
