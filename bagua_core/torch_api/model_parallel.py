"""Not offered yet."""

from __future__ import annotations

from bagua_core.torch_api.errors import not_offered

raise not_offered("model_parallel", "every worker holds the whole model here")
