"""Certificates, TLS for gRPC and roles in etcd."""
