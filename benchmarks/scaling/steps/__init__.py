"""Simulates the steps of one job: clocks and links of all nodes, and what each algorithm sends and computes."""
