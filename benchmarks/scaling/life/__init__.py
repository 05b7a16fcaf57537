"""Simulates the life of a job whose nodes fail and come back, with the recovery times of each system."""
