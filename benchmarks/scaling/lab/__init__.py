"""Calibrates the simulator: measures steps on lab hosts, fits its costs, and compares held-out predictions."""
