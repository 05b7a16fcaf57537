"""An etcd that asks for certificates, and their holders, as in the service's tests."""

from tests.agent.service.conftest import etcd, people

__all__ = ["etcd", "people"]
