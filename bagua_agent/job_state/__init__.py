"""What an agent knows of its job: decoded from etcd, changed in one place, shown on the console."""
