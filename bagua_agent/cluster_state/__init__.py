"""What a daemon knows of the cluster, decoded from etcd."""
