"""Refuses torch's default process group beside this runtime: it would not follow a change of membership.

torch_api answers torch.distributed's calls by itself (torch_default_group.py). A group that a script made before is set
aside there: it stays, unused, because its peers may still be connecting to it. The group of this worker's replica is
the runtime's own, and ends with the replica.
"""

from __future__ import annotations

import torch.distributed

from bagua_core.elastic.replica import torch_group
from bagua_core.errors import UserError

_NO_GROUP = "Default process group has not been initialized"  # begins torch's error
_is_set_aside = False


class MixedModesError(UserError, RuntimeError):
    """The script uses torch's default process group and this runtime, which follow membership in different ways."""

    def __init__(self) -> None:
        super().__init__(
            "torch.distributed.init_process_group and bagua_core.init_process_group were both called: a worker either "
            "follows membership in its process, or is started again for each change; call only one of the two"
        )


def is_made() -> bool:
    """Tells whether torch's default process group exists, by torch's own functions: those of torch.distributed may be
    replaced by torch_api."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed import distributed_c10d  # late: a torch without distributed lacks it

    return distributed_c10d.is_initialized()


def is_in_use() -> bool:
    return is_made() and not _is_set_aside and not torch_group.is_made()


def set_aside() -> None:
    """Marks the group that is there now, if there is one, as not used any more."""
    global _is_set_aside
    _is_set_aside = is_made()


def forbid_default_group() -> None:
    """Raises MixedModesError if torch's default process group is in use: it would not follow a change."""
    if is_in_use():
        raise MixedModesError


def explain_missing_group(error: BaseException) -> None:
    """Adds a note to torch's own error, whose advice is to call torch's init_process_group."""
    if isinstance(error, (ValueError, RuntimeError)) and _NO_GROUP in str(error) and not is_made():
        error.add_note(
            "bagua: an elastic job has no process group of torch.distributed, which could not follow its membership. "
            "Use bagua.get_rank(), bagua.allreduce() and the like, bagua.ElasticDataLoader instead of a "
            "DistributedSampler, and bagua.DistributedDataParallel; docs/guide/from-torchrun.md lists the replacements"
        )
