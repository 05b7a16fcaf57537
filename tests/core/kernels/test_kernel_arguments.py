"""Bad input gives one error that names the value and the next move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import bagua_core.kernels as kernels
from bagua_core.kernels import KernelArgumentError, targets

X = torch.ones(128)
E = torch.zeros(128)
C = kernels.minmax_bytes(128)
BYTES = torch.zeros(C, dtype=torch.uint8)

CASES: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (lambda: kernels.minmax_compress(X.double()), "torch.float64"),
    "strided": (lambda: kernels.minmax_compress(torch.ones(8, 8).t()), "contiguous"),
    "sparse": (lambda: kernels.minmax_compress(X.to_sparse()), "to_dense"),
    "dimensions": (lambda: kernels.minmax_compress(torch.ones(2, 2, 2)), r"\(2, 2, 2\)"),
    "block size 0": (lambda: kernels.minmax_compress(X, block_size=0), "block_size=0"),
    "block size odd": (lambda: kernels.minmax_compress(X, block_size=100), "block_size=100"),
    "block size large": (lambda: kernels.one_bit_bytes(5, 16384), "block_size=16384"),
    "count": (lambda: kernels.minmax_bytes(-1), "-1"),
    "out too small": (lambda: kernels.minmax_compress(X, BYTES[:-16]), rf"\[1, {C}\]"),
    "out dtype": (lambda: kernels.minmax_compress(X, torch.ones(C)), "uint8"),
    "out unaligned": (
        lambda: kernels.minmax_compress(X, torch.zeros(C + 1, dtype=torch.uint8)[1:]),
        "16 bytes",
    ),
    "rows": (
        lambda: kernels.minmax_decompress(BYTES.expand(2, C).contiguous(), torch.ones(3, 128)),
        r"\[3, ",
    ),
    "scale": (lambda: kernels.minmax_decompress(BYTES, X, scale=float("nan")), "scale=nan"),
    "no peers": (lambda: kernels.minmax_reduce(BYTES[:0].view(0, C), 128), "peers"),
    "reduced shape": (lambda: kernels.minmax_reduce_values(BYTES, torch.ones(2, 64)), r"\(2, 64\)"),
    "error dtype": (lambda: kernels.one_bit_compress(X, E.half()), "float16"),
    "error shape": (lambda: kernels.one_bit_compress(X, E[:64]), r"\(64,\)"),
    "no tensors": (lambda: kernels.flatten([]), "no tensors"),
    "mixed": (lambda: kernels.flatten([X, X.half()]), "tensor 1"),
    "cast": (lambda: kernels.flatten([X.long()], dtype=torch.float32), "int64"),
    "two dtypes": (lambda: kernels.flatten([X], X.clone(), dtype=torch.float16), "float16"),
    "flat shape": (lambda: kernels.unflatten(X, [X[:5]]), r"\[5\]"),
    "counts": (lambda: kernels.weighted_average(X, E[:5], 1.0, 1.0), "5 elements"),
    "weight": (lambda: kernels.weighted_average(X, E, float("inf"), 1.0), "x_weight=inf"),
    "two kinds of others": (lambda: kernels.add_difference(X, E, E.half()), "float16"),
    "left dtype": (lambda: kernels.one_bit_compress(X, E, left=E.half()), "left is torch.float16"),
    "second dtype": (lambda: kernels.adam_steps(X, E.half(), 1e-8, 32.0), "second is torch.float16"),
    "eps": (lambda: kernels.adam_gradients(X, E, 0.0), "eps=0.0"),
    "reach": (lambda: kernels.adam_steps(X, E, 1e-8, 0.0), "reach=0.0"),
    "before alone": (lambda: kernels.adam_steps(X, E, 1e-8, 32.0, before=E), "both or neither"),
    "before dtype": (
        lambda: kernels.adam_steps(X, E, 1e-8, 32.0, before=E.half(), after=E, decay=0.9),
        "before is torch.float16",
    ),
    "rate": (
        lambda: kernels.adam_update(X, X, X, E, share=0.1, weight_decay=0.0, eps=1e-8, rate=float("nan")),
        "rate=nan",
    ),
    "moment count": (
        lambda: kernels.adam_update(X, X, X[:5], E, share=0.1, weight_decay=0.0, eps=1e-8, rate=1.0),
        "first has 5 elements",
    ),
    "device": (lambda: kernels.minmax_compress(torch.empty(5, device="meta")), "meta"),
    "other device": (lambda: kernels.weighted_average(X, torch.empty(128, device="meta"), 1.0, 1.0), "meta"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named(case: str) -> None:
    call, named = CASES[case]
    with pytest.raises(KernelArgumentError, match=named):
        call()


def test_a_wrong_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(targets.CHOICE_VARIABLE, "fast")
    with pytest.raises(KernelArgumentError, match="BAGUA_KERNELS=fast; use one of auto, extension, fallback"):
        kernels.target()
