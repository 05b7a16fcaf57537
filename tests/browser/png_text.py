"""Writes and reads the text that a PNG file carries (chunks `tEXt`): what a picture of a page says, for a test."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def with_text(png: bytes, keyword: str, text: str) -> bytes:
    """The file with one more text, before its end. Raises UnicodeEncodeError for a character beyond Latin-1."""
    content = b"tEXt" + keyword.encode("latin-1") + b"\0" + text.encode("latin-1")
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    end = png.rindex(b"IEND") - 4
    return png[:end] + chunk + png[end:]


def texts(png: bytes) -> dict[str, str]:
    """Its texts by keyword."""
    return dict(
        tuple(data.decode("latin-1").split("\0", 1)) for kind, data in _chunks(png) if kind == b"tEXt"
    )


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    assert png.startswith(_SIGNATURE), "no PNG"
    at = len(_SIGNATURE)
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += length + 12
