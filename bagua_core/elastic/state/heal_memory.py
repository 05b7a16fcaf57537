"""Decides whether memory suffices for a copied state beside the live one, and reads how much memory is free.

Owns the margin. The user's limit is `BAGUA_STAGING_BYTES`, a variable of bagua_contract/environment.py. Knows nothing
of tensors but their size. A worker that gets "in place" must count as stateless before the first byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua_contract.environment import staging_bytes_in, variable
from bagua_contract.memory_cgroup import memory_cgroups

LIMIT_VARIABLE = variable("staging_bytes")
MARGIN_BYTES = 64 << 20  # for what the step itself, the loader and the neighbours take meanwhile
# By the version of control groups: the limit, what is used of it, and the field of memory.stat with the page cache.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True, slots=True)
class StagingChoice:
    stages: bool
    reason: str


def decide(needed_bytes: int, available_bytes: int | None, limit_bytes: int | None = None) -> StagingChoice:
    """Decides whether to stage a state of `needed_bytes`.

    available_bytes: None if unknown; staging is then tried. limit_bytes: the user's limit; None for no limit.
    """
    if limit_bytes is not None and needed_bytes > limit_bytes:
        return StagingChoice(False, f"{needed_bytes} bytes are more than {LIMIT_VARIABLE}={limit_bytes}")
    if available_bytes is not None and needed_bytes + MARGIN_BYTES > available_bytes:
        return StagingChoice(
            False, f"{needed_bytes} bytes and {MARGIN_BYTES} of margin are more than {available_bytes}"
        )
    return StagingChoice(True, f"{needed_bytes} bytes fit")


def limit_bytes_from(environ: Mapping[str, str]) -> int | None:
    """Returns the user's limit in bytes, or None for no limit. Raises WorkerEnvironmentError."""
    limit_bytes = staging_bytes_in(environ)
    return None if limit_bytes < 0 else limit_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether `error` is a failed allocation; torch's allocator for the CPU raises a plain RuntimeError."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns how many bytes this process may still take, by the host and by its control groups; None if unknown."""
    found = [b for b in (_of_host(root), *_of_groups(root)) if b is not None]
    return min(found, default=None)


def _of_host(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _of_groups(root: Path) -> list[int]:
    groups = memory_cgroups(_text(root / "proc/self/cgroup"), _text(root / "proc/self/mountinfo"))
    if groups is None:
        return []
    limit, usage, cache = _FILES[groups.version]
    found = []
    for number, folder in enumerate(root / folder.relative_to("/") for folder in groups.folders):
        if number and _text(folder / "memory.use_hierarchy").strip() == "0":
            break  # version 1: the limits of this group and of those above don't cover the groups below
        most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if most.isdecimal() and used.isdecimal():
            stat = dict(x.split(maxsplit=1) for x in _text(folder / "memory.stat").splitlines())
            found.append(int(most) - int(used) + int(stat.get(cache, "0")))  # a cache gives way
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not this kind of system: unknown
