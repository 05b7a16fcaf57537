"""Writes and reads the file of one rank's part of a checkpoint, so that an incomplete file never counts.

A line of magic, the length and checksum of a JSON header, the header, the manifests, the bytes. Written under another
name, synced to the disk, then renamed: a file of the right name is complete unless the disk is at fault, and then its
digests show it. No pickle. Which parts make a checkpoint is catalogue.py.
"""

from __future__ import annotations

import json
import os
import reprlib
import secrets
import stat
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from bagua_contract.records import StateName
from bagua_core.elastic.state.flat_digest import digest_of_bytes

FORMAT = 1
MAGIC = b"bagua checkpoint part\n"
_PREFIX = struct.Struct("<QI")
_CHUNK_BYTES = 16 << 20
_MOST_HEADER_BYTES = 64 << 20
_MOST = 1 << 63

EDGES = ("opened", "header", "half", "written", "synced", "renamed", "directory synced")
"""Where a process may die while it writes; `write` calls `at_edge` with each."""


class CorruptPart(Exception):
    """The file is not a whole part. Says why."""


@dataclass(frozen=True, slots=True)
class Header:
    """Everything about a part but its bytes.

    run: which start of the job on this directory, from 1. job: its nonce. parts: how many ranks wrote one.
    body_range: this part's stripe of the body's `body_bytes`; the bytes of the lead stand before it in part 0.
    digest: of the part's bytes. fingerprint: of the script.
    """

    run: int
    job: str
    name: StateName
    part: int
    parts: int
    body_bytes: int
    body_range: tuple[int, int]
    lead_bytes: int
    lead_manifest_bytes: int
    body_manifest_bytes: int
    manifests_crc: int
    layout_digest: str
    digest: int
    position: Mapping[str, int]
    fingerprint: Mapping[str, str]

    @property
    def data_bytes(self) -> int:
        return self.lead_bytes + self.body_range[1] - self.body_range[0]

    @property
    def manifest_bytes(self) -> int:
        return self.lead_manifest_bytes + self.body_manifest_bytes

    @property
    def whole(self) -> tuple[object, ...]:
        """What all parts of one checkpoint say alike. Not the position: it follows from the name."""
        return (
            self.run,
            self.job,
            self.name,
            self.parts,
            self.body_bytes,
            self.layout_digest,
            self.fingerprint,
        )

    def encode(self) -> bytes:
        values = asdict(self)
        values["name"] = [self.name.generation, self.name.step, self.name.operations]
        return json.dumps({"format": FORMAT, **values}, separators=(",", ":")).encode()

    @staticmethod
    def decode(text: bytes) -> Header:
        """Raises CorruptPart, also for values that no part can have."""
        try:
            values = json.loads(text)
            if values["format"] != FORMAT:
                raise CorruptPart(f"it is of format {values['format']!r}, this version reads {FORMAT}")
            values = {f.name: values[f.name] for f in fields(Header)}
            values["name"] = StateName(*values["name"])
            values["body_range"] = tuple(values["body_range"])
            header = Header(**values)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptPart(f"its header is unreadable: {error!r}") from error
        if odd := header.odd_values():
            raise CorruptPart(f"its header is unreadable: {odd}")
        return header

    def odd_values(self) -> str:
        """What of it no part can have; empty for nothing."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "int"}
        numbers |= {f"name.{f.name}": getattr(self.name, f.name) for f in fields(self.name)}
        for name, value in numbers.items():
            if type(value) is not int or (name != "digest" and not 0 <= value < _MOST):
                return f"{name} is {reprlib.repr(value)}"
        texts = (self.job, self.layout_digest)
        maps = (self.position, self.fingerprint)
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(m, dict) for m in maps):
            return "a text or a table is none"
        if len(self.body_range) != 2 or any(type(edge) is not int for edge in self.body_range):
            return f"body_range is {reprlib.repr(self.body_range)}"
        if not 0 <= self.body_range[0] <= self.body_range[1] <= self.body_bytes:
            return f"body_range is {self.body_range} of {self.body_bytes}"
        if not self.part < self.parts:
            return f"it is part {self.part} of {self.parts}"
        return ""


def open_ordinary(path: Path, buffering: int = -1) -> Any:
    """For reading; at once, whatever lies there. Raises OSError, CorruptPart for what is no ordinary file."""
    descriptor = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    )  # a FIFO without a writer blocks else
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptPart("it is no ordinary file")
        return os.fdopen(descriptor, "rb", buffering)
    except BaseException:
        os.close(descriptor)
        raise


def file_name(part: int, parts: int) -> str:
    return f"part-{part:05d}-of-{parts:05d}"


def write(
    directory: Path, header: Header, manifests: bytes, data: torch.Tensor, at_edge: Callable[[str], None]
) -> None:
    """Put the part into `directory`, made if only it is missing. data: uint8, on the CPU. Raises OSError."""
    if not directory.is_dir():
        directory.mkdir(
            exist_ok=True
        )  # not its parents: an unmounted disk must not be replaced by a directory
        sync_directory(directory.parent)
    target = directory / file_name(header.part, header.parts)
    # Two workers may write one part: after a loss each that is left writes the whole state.
    partial = directory / f".{target.name}.{secrets.token_hex(4)}.writing"
    encoded = header.encode()
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            at_edge("opened")
            _write_all(
                descriptor, MAGIC + _PREFIX.pack(len(encoded), zlib.crc32(encoded)) + encoded + manifests
            )
            at_edge("header")
            view = data.numpy().data
            _write_all(descriptor, view[: len(view) // 2])
            at_edge("half")
            _write_all(descriptor, view[len(view) // 2 :])
            at_edge("written")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        at_edge("synced")
        os.rename(partial, target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    at_edge("renamed")
    sync_directory(directory)
    at_edge("directory synced")


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_CHUNK_BYTES]) :]


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(path: Path) -> Header:
    """Also checks that the file is as long as it says. Raises CorruptPart, OSError."""
    with open_ordinary(path) as file:
        header, _ = _read_header(file)
        expected = file.tell() + header.manifest_bytes + header.data_bytes
        size_bytes = os.fstat(file.fileno()).st_size
    if size_bytes != expected:
        raise CorruptPart(f"it has {size_bytes} bytes instead of {expected}")
    return header


def read_manifests(path: Path) -> tuple[Header, bytes, bytes]:
    """Header, the lead's manifest, the body's. Raises CorruptPart, OSError."""
    with open_ordinary(path) as file:
        header, _ = _read_header(file)
        manifests = file.read(header.manifest_bytes)
    if len(manifests) != header.manifest_bytes or zlib.crc32(manifests) != header.manifests_crc:
        raise CorruptPart("its manifests have another checksum")
    return header, manifests[: header.lead_manifest_bytes], manifests[header.lead_manifest_bytes :]


def read_data(path: Path, lead: torch.Tensor, body: torch.Tensor) -> None:
    """Fill `lead` (only from a part that has one) and this part's stripe of the whole `body`; uint8.

    Raises CorruptPart when the bytes are not those that were written, OSError.
    """
    with open_ordinary(path, buffering=0) as file:
        header, _ = _read_header(file)
        file.seek(header.manifest_bytes, os.SEEK_CUR)
        begin, end = header.body_range
        pieces = [lead[: header.lead_bytes], body[begin:end]]
        for piece in pieces:
            _read_into(file, piece)
    # the digest was taken of lead and stripe as two runs
    if digest_of_bytes(pieces) != header.digest:
        raise CorruptPart("its bytes have another digest")


def digest(data: torch.Tensor, lead_bytes: int) -> int:
    """Of a part's bytes, as `read_data` checks it."""
    return digest_of_bytes([data[:lead_bytes], data[lead_bytes:]])


def _read_into(file: Any, piece: torch.Tensor) -> None:
    view = piece.numpy().data
    while view:
        count = file.readinto(view[:_CHUNK_BYTES])
        if not count:
            raise CorruptPart("it ends early")
        view = view[count:]


def _read_header(file: Any) -> tuple[Header, int]:
    """The header, and how many bytes it took; the file is positioned after it."""
    start = file.read(len(MAGIC) + _PREFIX.size)
    if len(start) < len(MAGIC) + _PREFIX.size or not start.startswith(MAGIC):
        raise CorruptPart("it is not a checkpoint's part")
    size_bytes, checksum = _PREFIX.unpack(start[len(MAGIC) :])
    text = file.read(size_bytes) if size_bytes <= _MOST_HEADER_BYTES else b""
    if len(text) != size_bytes or zlib.crc32(text) != checksum:
        raise CorruptPart("its header has another checksum")
    return Header.decode(text), len(start) + size_bytes
