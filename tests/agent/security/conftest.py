"""An etcd that asks for certificates, and people who have them, as the service's tests have them."""

from tests.agent.service.conftest import etcd, people

__all__ = ["etcd", "people"]
