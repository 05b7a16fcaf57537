"""Drives NCCL's network interface from Python: a plugin's, or that of NCCL's own socket transport.

driver.cc makes the calls in a process of its own, one for each line that `process.Driver` writes to it.
"""
