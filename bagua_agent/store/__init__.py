"""etcd: keys, connection, transactions, leases, watches, and the embedded server."""
