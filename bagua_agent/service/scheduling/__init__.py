"""The scheduler's thread: election, plans written to etcd, retention of ended jobs."""
