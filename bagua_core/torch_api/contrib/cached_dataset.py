"""Not offered yet."""

from __future__ import annotations

from bagua_core.torch_api.errors import not_offered

raise not_offered("contrib.cached_dataset", "keep what was computed in a dictionary or on disk")
