"""Rounds: the samples that each worker leases for many local steps, and what of an epoch is left."""
