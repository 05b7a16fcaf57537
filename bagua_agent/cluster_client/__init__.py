"""What people's commands do in a cluster: they write desired state into etcd and read what daemons report."""
