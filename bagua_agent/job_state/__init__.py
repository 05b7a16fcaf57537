"""An agent's state of its job: decoded from etcd, changed in one place, shown on the console."""
