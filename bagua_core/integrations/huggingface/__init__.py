"""accelerate's loops as elastic jobs: `accelerator = ElasticAccelerator("bytegrad")`. See docs/huggingface.md."""

from __future__ import annotations

from bagua_core.integrations.huggingface.elastic_accelerator import ElasticAccelerator
from bagua_core.integrations.huggingface.train_loader import TrainLoader

__all__ = ["ElasticAccelerator", "TrainLoader"]
