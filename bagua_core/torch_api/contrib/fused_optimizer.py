"""Not offered yet."""

from __future__ import annotations

from bagua_core.torch_api.errors import not_offered

raise not_offered("contrib.fused_optimizer", "use the optimizer's fused=True or foreach=True")
