"""Servers of etcd that an agent starts: a private one, and one that a node hosts for its job."""
