"""Reads `--checkpoint-dir`: a directory, or the URL of a place in an object store.

The one reader of that setting: the agent checks and completes the user's value with it, the core opens it.
"""

from __future__ import annotations

import re
from pathlib import Path

PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs",
    "gs": "gcsfs", "gcs": "gcsfs",
    "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
}  # fmt: skip
"""Protocols of stores in which an object appears whole or not at all, each with the package by which fsspec speaks it.

Others that fsspec speaks (sftp, hdfs, smb) show a file while it is written, so they are refused.
"""

_SEPARATOR = "://"
_PLACE = re.compile(r"[^/?#\s]+(/[^?#\s]*)?")


def is_url(text: str) -> bool:
    return _SEPARATOR in text


def complete(text: str) -> str:
    """Returns the value that workers get: an absolute path, or a URL without a slash at its end. Raises ValueError."""
    protocol, separator, place = text.partition(_SEPARATOR)
    if not separator:
        return str(Path(text).absolute())
    if protocol == "file" and place.startswith("/"):
        return str(Path(place))
    if protocol not in PACKAGES:
        raise ValueError(f"checkpoints are not written to {protocol}://")
    if not _PLACE.fullmatch(place):
        raise ValueError(f"not of the form {protocol}://BUCKET/PREFIX (without spaces, ? and #)")
    return text.rstrip("/")
