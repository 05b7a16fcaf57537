"""Decodes from etcd what a daemon knows of the cluster."""
