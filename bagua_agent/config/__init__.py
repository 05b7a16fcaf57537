"""A job's configuration, from arguments and files, and the credentials for etcd."""
