"""Stores checkpoints in an object store, through fsspec.

An object is put by one upload: it appears whole when the upload ends, and not at all if its writer dies before. Every
call has a deadline. Nothing is cached, and no local file is made.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from bagua_contract.checkpoint_dir import PACKAGES
from bagua_core.elastic.checkpoint.storage import CheckpointDirError, StoreError

CALL_S = 30.0
LEAST_BYTES_PER_S = 1 << 20
"""A call is given up after CALL_S and the time that its bytes take at this rate."""

_EXTRAS = {"s3fs": "bagua-elastic[object-storage]"}
_HEADER_BYTES = 256 << 10  # that one request fetches where little is read


def connect(url: str) -> ObjectStorage:
    """Connects to the store at `url`, as checkpoint_dir.complete gives it. Raises CheckpointDirError, StoreError."""
    package = PACKAGES[url.partition("://")[0]]
    try:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    except ImportError as error:
        wanted = _EXTRAS.get(package, package)
        raise CheckpointDirError(
            f"{url} needs the package {package}, which is not installed ({error}). Install it where the workers "
            f'run: pip install "{wanted}"'
        ) from error
    except Exception as error:
        raise StoreError(f"{url} can't be used: {error or repr(error)}") from error
    return ObjectStorage(files, root, url)


class ObjectStorage:
    """The `Storage` (storage.py) in an object store. files: an fsspec.asyn.AsyncFileSystem. root: bucket and prefix."""

    def __init__(self, files: Any, root: str, shown: str) -> None:
        self._files = files
        self._root = root
        self._shown = shown

    def __str__(self) -> str:
        return self._shown

    def prepare(self) -> None:
        """Does nothing: a prefix needs no making, and a bucket is not made."""

    def entries(self, directory: str = "") -> list[str]:
        path = self._path(directory)
        try:
            listed = self.call(directory, "_ls", path, detail=False)
        except FileNotFoundError:
            bucket = self._root.partition("/")[0]
            if not directory and not self.call("", "_exists", bucket):
                raise StoreError(f"{self}: the bucket {bucket} is not there or not visible") from None
            return []  # a prefix without objects
        paths = [str(each).rstrip("/") for each in listed]
        # Not an object in the prefix's own place
        return [each.rpartition("/")[2] for each in paths if each != path]

    def open(self, name: str) -> io.BufferedReader:
        size_bytes = self.call(name, "_info", self._path(name))["size"]
        return io.BufferedReader(_Object(self, name, size_bytes), _HEADER_BYTES)

    def read(self, name: str, first: int, last: int) -> bytes:
        """Reads the bytes from `first` to before `last`. Raises StoreError, FileNotFoundError."""
        span = {"start": first, "end": last}
        data: bytes = self.call(name, "_cat_file", self._path(name), moved_bytes=last - first, **span)
        return data

    def write(
        self,
        name: str,
        pieces: Sequence[bytes | memoryview],
        at_edge: Callable[[str], None] = lambda edge: None,
    ) -> None:
        data = b"".join(pieces)  # fsspec takes one run of bytes
        at_edge("joined")
        self.call(name, "_pipe_file", self._path(name), data, moved_bytes=len(data))
        at_edge("uploaded")

    def remove_directory(self, directory: str) -> None:
        for name in sorted(self.entries(directory)):
            self.call(directory, "_rm_file", self._path(f"{directory}/{name}"))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def call(self, name: str, method: str, *arguments: Any, moved_bytes: int = 0, **options: Any) -> Any:
        """Calls a coroutine of the file system and returns its result. name: for messages.

        Raises StoreError, FileNotFoundError.
        """
        from fsspec.asyn import sync

        limit_s = CALL_S + moved_bytes / LEAST_BYTES_PER_S
        where = f"{self}/{name}" if name else str(self)
        try:
            function = getattr(self._files, method)
            return sync(self._files.loop, function, *arguments, timeout=limit_s, **options)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{where}: {error}") from error
        except TimeoutError as error:
            raise StoreError(f"{where}: the store did not answer within {limit_s:.0f} s") from error
        except Exception as error:
            raise StoreError(f"{where}: {error or repr(error)}") from error


class _Object(io.RawIOBase):
    """An object to read, by ranges."""

    def __init__(self, storage: ObjectStorage, name: str, size_bytes: int) -> None:
        self._storage = storage
        self._name = name
        self._size_bytes = size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        last = min(self._at + len(buffer), self._size_bytes)
        if last <= self._at:
            return 0
        data = self._storage.read(self._name, self._at, last)[: last - self._at]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
