"""A state's manifest and bytes, corrupted on their way: one kind of error, no hang, no huge allocation."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_core.elastic.state.state_codec import (
    StateCodecError,
    allocate,
    decode,
    encode,
)

FUZZ = settings(max_examples=200)
STATE: dict[str, Any] = {
    "weights": torch.arange(12.0).reshape(3, 4).t(),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "numbers": [1, 0.5, None, True, "ü", (1, 2), {3: b"x"}],
    "size": torch.Size([2]),
    "dtype": torch.int8,
}
MANIFEST, TENSORS = encode(STATE)
RUN = torch.empty(TENSORS.size_bytes, dtype=torch.uint8)
TENSORS.read(0, RUN)
# decode says ValueError where the bytes are too few
REFUSALS = (StateCodecError, ValueError)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """What is announced and not there must not be allocated: 4 GiB more than now is refused by the system."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def refused_or_read(manifest: bytes, run: torch.Tensor = RUN) -> None:
    for use in (lambda: decode(manifest, run), lambda: decode(manifest, run, copy=False)):
        with contextlib.suppress(*REFUSALS):
            use()


@given(data=st.data())
@FUZZ
def test_a_manifest_with_some_bytes_changed(data: st.DataObject) -> None:
    changed = bytearray(MANIFEST)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    refused_or_read(bytes(changed))


@given(st.binary(max_size=80))
@FUZZ
def test_a_manifest_of_any_bytes(manifest: bytes) -> None:
    refused_or_read(manifest)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6), inner, max_size=3)
        | st.builds(
            lambda tag, content: {tag: content},
            st.sampled_from(
                [
                    "float",
                    "bytes",
                    "tensor",
                    "size",
                    "dtype",
                    "device",
                    "tuple",
                    "dict",
                    "counter",
                    "array",
                    "scalar",
                ]
            ),
            inner,
        )
    ),
    max_leaves=8,
)


@given(state=JSON, tensors=JSON)
@FUZZ
def test_a_manifest_of_any_shape(state: Any, tensors: Any) -> None:
    whole = json.loads(MANIFEST)
    refused_or_read(json.dumps({**whole, "state": state}).encode())
    refused_or_read(json.dumps({**whole, "tensors": tensors}).encode())


@given(
    shape=st.lists(st.integers(-(2**63), 2**63), max_size=3) | JSON,
    stride=st.lists(st.integers(-(2**63), 2**63), max_size=3) | JSON,
    dtype=st.sampled_from(["float32", "int8", "complex128", "quint8", "nn", "", "Tensor"]) | JSON,
    device=st.sampled_from(["cpu", "cuda", "meta", "nowhere"]) | JSON,
)
@FUZZ
def test_a_tensor_described_as_anything(shape: Any, stride: Any, dtype: Any, device: Any) -> None:
    whole = json.loads(MANIFEST)
    described = {"dtype": dtype, "shape": shape, "stride": stride, "device": device}
    manifest = json.dumps({**whole, "tensors": [described], "state": {"tensor": 0}}).encode()
    refused_or_read(manifest)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [([1 << 40], [1]), ([1 << 62, 4], [4, 1]), ([2], [1 << 40]), ([1 << 20, 1 << 20], [0, 0]), ([-1], [1])],
)
def test_more_than_there_is_is_announced(shape: list[int], stride: list[int]) -> None:
    whole = json.loads(MANIFEST)
    described = {"dtype": "float64", "shape": shape, "stride": stride, "device": "cpu"}
    manifest = json.dumps({**whole, "tensors": [described], "state": {"tensor": 0}}).encode()
    with pytest.raises(REFUSALS):
        decode(manifest, RUN)
    with pytest.raises(REFUSALS):
        allocate(manifest)


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_a_manifest_nested_without_end(depth: int) -> None:
    whole = MANIFEST[: MANIFEST.index(b'"state"')]
    refused_or_read(b'{"version": 1, "tensors": [], "state": ' + b"[" * depth + b"]" * depth + b"}")
    refused_or_read(whole + b'"state": ' + b'{"tuple": [' * depth + b"]}" * depth + b"}")


@pytest.mark.parametrize("size_bytes", [0, 1, 63, 64, RUN.numel() - 65])
def test_too_few_bytes(size_bytes: int) -> None:
    with pytest.raises(REFUSALS):
        decode(MANIFEST, RUN[:size_bytes])


@given(data=st.data())
@FUZZ
def test_bytes_that_were_changed_give_a_state_of_the_same_form(data: st.DataObject) -> None:
    run = RUN.clone()
    run[data.draw(st.integers(0, run.numel() - 1))] = data.draw(st.integers(0, 255))
    state = decode(MANIFEST, run)
    assert state["weights"].shape == STATE["weights"].shape and state["numbers"] == STATE["numbers"]
