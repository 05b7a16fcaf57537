"""The client of etcd: keys, leases, watches, transactions, mirrors of key ranges."""
