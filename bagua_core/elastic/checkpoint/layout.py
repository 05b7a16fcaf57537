"""Divides a state for a checkpoint: what only rank 0 writes, and which bytes of the rest each rank writes.

The split of a captured state into `lead` (buffers and registered state: those of rank 0 count, for it shares its
buffers before each forward) and `body` (parameters and optimizers, equal on all ranks of one state name), and back.
The body's run of bytes is striped over the ranks. Knows no files.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from bagua_core.elastic.state import state_codec

_BUFFER = "buffer."
_BODY = ("modules", "optimizers", "gradients")


@dataclass(frozen=True, slots=True)
class Stripe:
    """One rank's part of an encoded state: live tensors, to be read before they change.

    body_range: of the whole run of `body_bytes` bytes. lead and the manifests are empty on all ranks but 0.
    layout_digest: of the body's dtypes and shapes; parts of one state agree in it.
    """

    body: state_codec.FlatTensors
    body_range: tuple[int, int]
    layout_digest: str
    body_manifest: bytes = b""
    lead: state_codec.FlatTensors | None = None
    lead_manifest: bytes = b""

    @property
    def lead_bytes(self) -> int:
        return self.lead.size_bytes if self.lead is not None else 0

    @property
    def size_bytes(self) -> int:
        return self.lead_bytes + self.body_range[1] - self.body_range[0]

    @property
    def manifests_crc(self) -> int:
        return zlib.crc32(self.lead_manifest + self.body_manifest)

    def read_into(self, out: torch.Tensor) -> None:
        """Fill `out` (uint8, size_bytes long): the lead, then the stripe."""
        if self.lead is not None:
            state_codec.read_bytes(self.lead, 0, out[: self.lead_bytes])
        state_codec.read_bytes(self.body, self.body_range[0], out[self.lead_bytes :])


def stripe(state: dict[str, Any], part: int, parts: int) -> Stripe:
    """state: as StateRegistry.capture gives it, with any plain values beside. Raises StateCodecError."""
    lead_state, body_state = _split(state)
    body_manifest, body = state_codec.encode(body_state)
    body_range = state_codec.byte_ranges(body.size_bytes, parts, part)
    layout = layout_digest(body_manifest)
    if part > 0:
        return Stripe(body, body_range, layout)
    lead_manifest, lead = state_codec.encode(lead_state)
    return Stripe(body, body_range, layout, body_manifest, lead, lead_manifest)


def decode(
    lead_manifest: bytes, lead: torch.Tensor, body_manifest: bytes, body: torch.Tensor
) -> dict[str, Any]:
    """The state that `stripe` was given. Each tensor owns its memory: optimizers keep some of them."""
    return _joined(
        state_codec.decode(lead_manifest, lead),
        state_codec.decode(body_manifest, body),
    )


def layout_digest(manifest: bytes) -> str:
    tensors = json.loads(manifest)["tensors"]
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()[:16]


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    lead = {key: value for key, value in state.items() if key not in _BODY}
    lead["modules"] = [
        {name: tensor for name, tensor in tensors.items() if name.startswith(_BUFFER)}
        for tensors in state["modules"]
    ]
    body = {
        **({"gradients": state["gradients"]} if "gradients" in state else {}),
        "modules": [
            {name: tensor for name, tensor in tensors.items() if not name.startswith(_BUFFER)}
            for tensors in state["modules"]
        ],
        "optimizers": state["optimizers"],
    }
    return lead, body


def _joined(lead: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    modules = [{**a, **b} for a, b in zip(lead["modules"], body["modules"], strict=True)]
    return {**lead, **body, "modules": modules}
