"""Defines the settings of a job's steps that may change while it runs, and their protobuf form.

A generation carries them, so all of its members use the same ones. Pure; knows no model and no etcd.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bagua_contract import membership_pb2 as pb

LEAST_BUCKET_BYTES = 1 << 10
MOST_BUCKET_BYTES = 1 << 31
MOST_ORDERED = 1 << 16
SWITCHABLE = ("gradient_allreduce", "bytegrad", "qadam")
"""Algorithms of which one may take another's place between two steps: what they keep from step to step can be dropped.
"""

QADAM_OPTIMIZER = "QAdamOptimizer"  # in a fingerprint
QADAM_TAKES_NO_FROZEN = (
    "some parameters were frozen when the model was wrapped, and qadam could not take them on if the script unfroze "
    "them; wrap the model first and freeze them after that"
)
QADAM_TAKES_NO_SHARDS = "the model has sharded parameters, and qadam does not act on shards"

_TAKES_SETTINGS = re.compile(rf"(?:^|, )(?:{'|'.join(SWITCHABLE)})\b")
_FROZEN_NOTE = re.compile(r", [0-9]+ of [0-9]+ parameters frozen \([0-9a-f]*\)")


def frozen_note(frozen: int, count: int, digest: str) -> str:
    """Returns the text behind the algorithm in a fingerprint if parameters were frozen when the model was wrapped."""
    return f", {frozen} of {count} parameters frozen ({digest})"


def declared_algorithm(fingerprint: Mapping[str, str]) -> str:
    """Returns the script's algorithm, without its arguments; empty: unknown."""
    return _FROZEN_NOTE.sub("", fingerprint.get("algorithm", "")).partition("(")[0]


def takes_settings(fingerprint: Mapping[str, str]) -> bool:
    """Tells whether a model of this job has an algorithm that takes settings. Other algorithms keep state that can't be
    dropped, or exchange something else than gradients."""
    declared = fingerprint.get("algorithm", "")
    return not declared or _TAKES_SETTINGS.search(declared) is not None


def takes(algorithm: str, fingerprint: Mapping[str, str]) -> bool:
    """Tells whether a job with this fingerprint can switch to `algorithm`.

    qadam compresses momentum in units of a second moment that no longer changes, which only the script's optimizer can
    keep, and knows its parameters from the wrapping.
    """
    if algorithm != "qadam":
        return True
    return fingerprint.get("optimizers") == QADAM_OPTIMIZER and not why_not_qadam(fingerprint)


def why_not_qadam(fingerprint: Mapping[str, str]) -> str:
    """Returns why a job that has the optimizer of qadam cannot switch to it; empty: it can."""
    if declared_algorithm(fingerprint) == "qadam":
        return ""
    if "sharding" in fingerprint:
        return QADAM_TAKES_NO_SHARDS
    return QADAM_TAKES_NO_FROZEN if _FROZEN_NOTE.search(fingerprint.get("algorithm", "")) else ""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of a job's steps. Each field has a value of its own for "as the script says".

    Raises ValueError for what no job can use.
    """

    bucket_bytes: int = 0  # a bucket is closed once it holds as many; 0: as the script says
    hierarchical: bool | None = None  # whether workers of a node sum among themselves first
    algorithm: str = ""  # one of SWITCHABLE
    order: tuple[int, ...] = ()  # trained parameters by place, in the order of their gradients; a permutation

    def __post_init__(self) -> None:
        if self.bucket_bytes and not LEAST_BUCKET_BYTES <= self.bucket_bytes <= MOST_BUCKET_BYTES:
            raise ValueError(
                f"buckets of {self.bucket_bytes} bytes are not from {LEAST_BUCKET_BYTES} to {MOST_BUCKET_BYTES}"
            )
        if self.algorithm and self.algorithm not in SWITCHABLE:
            raise ValueError(f"algorithm {self.algorithm[:40]!r} is not one of {', '.join(SWITCHABLE)}")
        if len(self.order) > MOST_ORDERED or sorted(self.order) != list(range(len(self.order))):
            raise ValueError(f"an order of {len(self.order)} parameters is not a permutation of them")

    @property
    def is_empty(self) -> bool:
        """Whether all settings are as the script says."""
        return self == AS_SCRIPTED

    def over(self, other: StepSettings) -> StepSettings:
        """Returns these settings, with those of `other` where these leave it to the script."""
        own = {
            f.name: v for f in fields(self) if (v := getattr(self, f.name)) != getattr(AS_SCRIPTED, f.name)
        }
        return replace(other, **own)

    def to_proto(self) -> pb.StepSettings:
        # Not at the top: a command line is read without protobuf
        from bagua_contract import (
            membership_pb2 as pb,
        )

        hierarchical = pb.StepSettings.SCRIPT
        if self.hierarchical is not None:
            hierarchical = pb.StepSettings.ON if self.hierarchical else pb.StepSettings.OFF
        return pb.StepSettings(
            bucket_bytes=self.bucket_bytes,
            hierarchical=hierarchical,
            algorithm=self.algorithm,
            order=self.order,
        )

    @staticmethod
    def from_proto(message: pb.StepSettings) -> StepSettings:
        """Returns the settings of a message. Raises ValueError for those that no job can use."""
        from bagua_contract import membership_pb2 as pb

        known = {pb.StepSettings.SCRIPT: None, pb.StepSettings.ON: True, pb.StepSettings.OFF: False}
        if message.hierarchical not in known:
            raise ValueError(f"hierarchical {message.hierarchical} is unknown")
        return StepSettings(
            message.bucket_bytes, known[message.hierarchical], message.algorithm, tuple(message.order)
        )

    def __str__(self) -> str:
        parts = []
        if self.algorithm:
            parts.append(f"algorithm {self.algorithm}")
        if self.bucket_bytes:
            parts.append(f"buckets of {size_text(self.bucket_bytes)}")
        if self.hierarchical is not None:
            parts.append("hierarchical" if self.hierarchical else "flat")
        if self.order:
            parts.append(f"measured order of {len(self.order)} tensors")
        return ", ".join(parts) or "as the script says"


AS_SCRIPTED = StepSettings()


def size_text(size_bytes: int) -> str:
    """Formats a size in the largest unit in which it is whole."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} bytes"
