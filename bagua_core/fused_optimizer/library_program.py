"""How does the CPU's own library run a recorded step, and does it give the very bits that torch does?

Whether torch rounds a product before it adds it, and which library takes its roots, depends on its build and on the
processor; so that is tried, once in a process. A program is proved as a whole besides (recorded_pass.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from bagua_core.fused_optimizer.lowering import lower
from bagua_core.fused_optimizer.recording import NotRecordable, Recording
from bagua_core.fused_optimizer.representatives import ELEMENTS_OF_A_PROOF
from bagua_core.kernels.elementwise import Program, Step, use_torchs_sqrt
from bagua_core.kernels.errors import KernelUnavailableError

_NUMBER = 0.3


class LibraryProgram:
    """Raises NotRecordable where the library has no such program, or there is no library."""

    def __init__(self, recording: Recording, inputs: object) -> None:
        try:
            self._lowered = lower(recording, torchs_variants())
            self._program = Program(self._lowered.steps, self._lowered.memories, self._lowered.temporaries)
        except KernelUnavailableError as error:
            raise NotRecordable(str(error)) from error
        self._inputs = len(recording.inputs)

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        return tensor.dtype == torch.float32 and tensor.device.type == "cpu"

    def run(self, recording: Recording, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """See recorded_pass.Program."""
        if not all(map(self.takes, parts[0])):
            raise NotRecordable("it works on something else than fp32 on the CPU")
        made = [
            [torch.empty_like(inputs[0]) for _ in range(self._lowered.memories - self._inputs)]
            for inputs in parts
        ]
        memories = [[*i, *m] for i, m in zip(parts, made, strict=True)]
        numbers = [*recording.numbers, *(s.item() for s in recording.shared), *self._lowered.constants]
        self._program.run(memories, numbers)
        written = [place for place in self._lowered.written if place < self._inputs]
        torch.autograd.graph.increment_version([inputs[place] for inputs in parts for place in written])
        return [[own[place] for place in self._lowered.results] for own in memories]


@functools.cache
def torchs_variants() -> Mapping[str, str]:
    """Which operation of the library gives torch's bits, where it has several. Raises KernelUnavailableError."""
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(ELEMENTS_OF_A_PROOF, generator=generator) for _ in range(3))
    roots = ("sqrt", "given_sqrt") if use_torchs_sqrt() else ("sqrt",)
    tries: dict[tuple[str, ...], Callable[[], Tensor]] = {
        roots: lambda: torch.sqrt(x.abs()),
        ("add_scaled", "add_scaled_fused"): lambda: torch.add(x, y, alpha=_NUMBER),
        ("subtract_scaled", "subtract_scaled_fused"): lambda: torch.sub(x, y, alpha=_NUMBER),
        ("add_product", "add_product_fused"): lambda: torch.addcmul(x, y, z, value=_NUMBER),
        ("interpolate", "interpolate_fused"): lambda: torch.lerp(x, y, _NUMBER),
    }
    found = {}
    for variants, call in tries.items():
        first = x.abs() if "sqrt" in variants else x
        for name in variants:
            out = torch.empty_like(x)
            Program([Step(name, 3, 0, 1, 2)], 4, 0).run([(first, y, z, out)], [_NUMBER])
            if torch.equal(out, call()):
                found[variants[0]] = name
                break
    return MappingProxyType(found)
