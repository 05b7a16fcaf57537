"""Reads a job for people: its records in etcd, and what its agents answer."""
