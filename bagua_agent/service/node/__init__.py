"""Collects what a node reports and serves: facts, checks, its gRPC server and log service."""
