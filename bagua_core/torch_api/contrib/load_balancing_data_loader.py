"""Not offered yet."""

from __future__ import annotations

from bagua_core.torch_api.errors import not_offered

raise not_offered("contrib.load_balancing_data_loader", "use ElasticDataLoader or torch's DistributedSampler")
