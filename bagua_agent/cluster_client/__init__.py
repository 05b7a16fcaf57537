"""Implements people's commands in a cluster: they write desired state into etcd and read what daemons report."""
