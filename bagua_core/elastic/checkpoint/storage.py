"""The interface through which checkpoints reach a directory or an object store, and the choice between the two.

Names are relative to the root: NAME or DIRECTORY/NAME. What is written under a name appears whole or not at all, in
each storage by its own means. catalogue.py decides which names make a checkpoint.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from bagua_contract import checkpoint_dir
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.errors import InfrastructureLost, UserError

_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# A FIFO, a socket, a device, a loop of links
_ODD = frozenset({errno.EINVAL, errno.ELOOP, errno.ENODEV, errno.ENXIO})


class Storage(Protocol):
    """A place for checkpoints. str() of it is what the user gave, for messages."""

    def prepare(self) -> None:
        """Makes the root if it can be made. Raises OSError."""

    def entries(self, directory: str = "") -> list[str]:
        """Returns the names in the root, or in one of its directories. Raises OSError."""

    def open(self, name: str) -> io.BufferedReader:
        """Opens a file for reading; seekable. Raises OSError, also for what is no ordinary file."""

    def write(
        self, name: str, pieces: Sequence[bytes | memoryview], at_edge: Callable[[str], None] = ...
    ) -> None:
        """Puts the pieces, one after another, under the name. Durable when it returns. Raises OSError.

        at_edge: called where a writer may die.
        """

    def remove_directory(self, directory: str) -> None:
        """Removes a directory with all its names, in their order. Raises OSError."""


class CheckpointDirError(UserError, ValueError):
    """`--checkpoint-dir` is a URL that cannot be used, or whose package is not installed. The message says why."""


class StoreError(InfrastructureLost, OSError):
    """A storage did not do what it was asked. The message says with which object, and why. The object may be whole."""


def may_be_whole(error: OSError) -> bool:
    """Tells whether the error says nothing of the object that was to be read: a mount, a network, rights or memory
    failed.

    False: no object, or an odd file, lies under its name.
    """
    return not isinstance(error, _ABSENT) and error.errno not in _ODD


def storage_of(text: str) -> Storage:
    """Returns the storage that a `--checkpoint-dir` names. Raises CheckpointDirError, StoreError."""
    try:
        place = checkpoint_dir.complete(text)
    except ValueError as error:
        raise CheckpointDirError(
            f"{text}: {error}; known are {', '.join(checkpoint_dir.PACKAGES)}"
        ) from error
    if not checkpoint_dir.is_url(place):
        return LocalStorage(Path(place))
    from bagua_core.elastic.checkpoint.object_storage import connect  # imports fsspec

    return connect(place)
