"""The output of workers: routing, prefixes, log files and their rotation, terminals."""
