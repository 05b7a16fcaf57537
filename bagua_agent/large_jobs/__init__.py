"""Keeps a change of membership cheap for every member of a job with thousands of nodes. Small jobs do not use it."""
