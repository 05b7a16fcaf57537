"""Jobs whose dashboards a browser opens."""

from tests.browser.browser import chromium
from tests.faults.conftest import etcd, job

__all__ = ["chromium", "etcd", "job"]
