"""Not offered: a script saves with torch.save, and an elastic job with --checkpoint-dir."""

from __future__ import annotations

from bagua_core.torch_api.errors import not_offered

raise not_offered(
    "checkpoint", "save on rank 0 with torch.save, or let the job write checkpoints (--checkpoint-dir)"
)
