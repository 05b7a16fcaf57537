"""Logs of jobs on a node: following, keeping, removing."""
