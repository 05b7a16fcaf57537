"""What people's commands do to a cluster and learn of it: desired state in etcd, and what daemons show."""
