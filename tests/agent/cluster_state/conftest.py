"""An etcd without certificates, as the service's tests have it."""

from tests.agent.service.conftest import plain_etcd, plain_store

__all__ = ["plain_etcd", "plain_store"]
