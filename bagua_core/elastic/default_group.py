"""Has the script made torch's default process group beside this runtime? Then nobody would renew it."""

from __future__ import annotations

import torch.distributed


class MixedModesError(RuntimeError):
    """The script uses torch's default process group and this runtime, which follow membership in different ways."""

    def __init__(self) -> None:
        super().__init__(
            "torch.distributed.init_process_group and bagua_core.init_process_group were both called: a worker either "
            "follows membership in its process, or is started again for each change; call only one of the two"
        )


def is_made() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def forbid_default_group() -> None:
    """Raises MixedModesError if torch's default process group exists: nobody would renew it after a change."""
    if is_made():
        raise MixedModesError
