"""Tests of the store against real etcd servers."""
