"""State comes back as it went, in any number of pieces, or is refused with its path."""

from __future__ import annotations

import collections
import enum
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_core.elastic.heal import pinned_chunks
from bagua_core.elastic.state.flat_digest import _BLOCK_WORDS, _ROW_WORDS, _sum_on_host, _weights
from bagua_core.elastic.state.flat_tensors import ALIGNMENT_BYTES, FlatTensors, byte_ranges, digest
from bagua_core.elastic.state.state_codec import StateCodecError, allocate, decode, encode


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(
                a.detach().reshape(-1).contiguous().view(torch.uint8),
                b.reshape(-1).contiguous().view(torch.uint8),
            )
        )
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def sent(state: Any, parts: int = 3, chunk_bytes: int = 50, **options: Any) -> Any:
    """Through the bytes, in stripes and chunks."""
    manifest, tensors = encode(state)
    run = torch.full((tensors.size_bytes,), 0xAA, dtype=torch.uint8)
    for part in range(parts):
        begin, end = byte_ranges(run.numel(), parts, part)
        for at in range(begin, end, chunk_bytes):
            tensors.read(at, run[at : min(at + chunk_bytes, end)])
    return decode(manifest, run, **options)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(lambda n: torch.arange(n) * 1.5, st.integers(0, 9))
)
KEYS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=3)
    | st.tuples(st.integers(), st.text(max_size=2))
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(state=NESTED, parts=st.integers(1, 5), chunk_bytes=st.integers(1, 100), copy=st.booleans())
def test_nested_values_come_back(state: Any, parts: int, chunk_bytes: int, copy: bool) -> None:
    assert same(state, sent(state, parts, chunk_bytes, copy=copy))


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int8,
    torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("copy", [True, False])
def test_tensors_of_any_dtype(copy: bool) -> None:
    state = {str(d): torch.randn(3, 5).mul(3).to(d) for d in DTYPES}
    state["scalar"] = torch.tensor(7.5)
    state["empty"] = torch.empty(0, 4)
    assert same(state, sent(state, copy=copy))


def test_layouts() -> None:
    pictures = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    wide = torch.randn(6, 6)
    state = [
        pictures,
        wide.t(),
        wide[::2, 1:3],
        wide[1:3],
        torch.ones(1).expand(4),
        torch.randn(3, dtype=torch.complex64).conj(),
    ]
    got = sent(state)
    assert all(torch.equal(a, b) for a, b in zip(state, got, strict=True))
    assert got[0].stride() == pictures.stride()


def test_what_optimizers_and_schedulers_hold() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = {"m": dict(model.state_dict()), "o": optimizer.state_dict(), "s": scheduler.state_dict()}
    got = sent(state)
    assert same(state, got)
    other = torch.nn.Linear(3, 2)
    torch.optim.AdamW(other.parameters()).load_state_dict(got["o"])


def test_other_values() -> None:
    state = [
        torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), collections.Counter("hello"),
        np.arange(6, dtype=">i4").reshape(2, 3), np.array("text"), np.float32(1.5), np.int64(-3),
        np.bool_(True), np.datetime64("2024-01-02"), np.zeros((0, 2)), np.random.RandomState(0).get_state(),
        float("inf"), -float("inf"), float("nan"), -0.0, 10**40,
    ]  # fmt: skip
    got = sent(state)
    assert same(state, got)
    assert math.copysign(1, got[15]) == -1
    got[4][0, 0] = 9  # arrays can be written to
    ordered = sent([collections.OrderedDict(b=1, a=2), collections.defaultdict(int, x=1)])
    assert ordered == [{"b": 1, "a": 2}, {"x": 1}] and type(ordered[0]) is dict


def test_one_memory_travels_once() -> None:
    weight = torch.nn.Parameter(torch.randn(100))
    manifest, tensors = encode({"a": weight, "b": weight.detach(), "c": weight[:50]})
    assert len(tensors) == 2
    got = decode(manifest, allocate(manifest))
    assert got["a"] is got["b"]


def test_live_tensors_are_not_copied() -> None:
    weight = torch.zeros(8)
    _, tensors = encode([weight])
    weight.fill_(1)
    out = torch.empty(32, dtype=torch.uint8)
    tensors.read(0, out)
    assert torch.equal(out.view(torch.float32), torch.ones(8))


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [1, object()]}, r"state\['a'\]\[1\] is a builtins.object"),
        ({"a": Colour.RED}, r"state\['a'\] is a .*Colour"),
        ({"a": {1, 2}}, "builtins.set"),
        ({frozenset(): 1}, "key frozenset"),
        ({(1, torch.int8): 1}, "key torch.int8 of type dtype"),
        (torch.empty(2, device="meta"), "device meta"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        ([np.array([object()])], r"state\[0\] is a numpy.ndarray of object"),
        (lambda: 0, "function"),
    ],
)
def test_what_cannot_travel_is_named(state: Any, words: str) -> None:
    with pytest.raises(StateCodecError, match=words):
        encode(state)


def test_a_state_that_contains_itself() -> None:
    state: list[Any] = []
    state.append({"again": state})
    with pytest.raises(StateCodecError, match=r"state\[0\]\['again'\] contains itself"):
        encode(state)


@pytest.mark.parametrize("manifest", [b"\xff", b"[]", b'{"version":2}', b"{"])
def test_manifests_of_another_kind_are_refused(manifest: bytes) -> None:
    with pytest.raises(StateCodecError, match="manifest"):
        decode(manifest, torch.empty(0, dtype=torch.uint8))


def test_manifest_is_strict_json_and_too_few_bytes_are_refused() -> None:
    manifest, _ = encode([torch.ones(20), float("nan")])
    json.loads(manifest, parse_constant=lambda name: pytest.fail(name))
    with pytest.raises(ValueError, match="80 bytes, 10 arrived"):
        decode(manifest, torch.empty(10, dtype=torch.uint8))


@given(total=st.integers(0, 5000), parts=st.integers(1, 9))
def test_stripes_cover(total: int, parts: int) -> None:
    stripes = [byte_ranges(total, parts, part) for part in range(parts)]
    assert stripes[0][0] == 0 and stripes[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(stripes))
    sizes = [end - begin for begin, end in stripes]
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT_BYTES


@given(data=st.data())
def test_any_range_can_be_written(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=5))
    source = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in counts]
    target = [torch.zeros_like(t) for t in source]
    flat = FlatTensors(source)
    total = flat.size_bytes
    cut = data.draw(st.integers(0, total))
    for begin, end in ((cut, total), (0, cut)):
        piece = torch.empty(end - begin, dtype=torch.uint8)
        flat.read(begin, piece)
        assert torch.equal(pinned_chunks.read(flat, begin, end), piece)
        pinned_chunks.write(FlatTensors(target), begin, piece)
    assert all(torch.equal(a, b) for a, b in zip(source, target, strict=True))
    with pytest.raises(ValueError, match="are not within"):
        flat.read(total, torch.empty(1, dtype=torch.uint8))


def test_digest_sees_every_change() -> None:
    words = torch.randint(-(2**62), 2**62, (3 * _BLOCK_WORDS + 5,))
    usual = digest([words])
    assert 0 <= usual < 2**63 and digest([words.clone()]) == usual
    swapped = words.clone()
    swapped[[1, 2]] = words[[2, 1]]
    blocks = torch.cat(
        [words[_BLOCK_WORDS : 2 * _BLOCK_WORDS], words[:_BLOCK_WORDS], words[2 * _BLOCK_WORDS :]]
    )
    assert len({usual, digest([swapped]), digest([blocks]), digest([words[:-1]])}) == 4
    for place in (0, _BLOCK_WORDS, words.numel() - 1):
        flipped = words.clone()
        flipped[place] ^= 1 << 63 - 1
        assert digest([flipped]) != usual


def test_digest_of_odd_sizes_and_places() -> None:
    run = torch.randint(0, 255, (8 * _BLOCK_WORDS + 29,), dtype=torch.uint8)
    for begin in (0, 1, 8):
        for end in (begin, begin + 1, begin + 13, run.numel()):
            assert digest([run[begin:end]]) == digest([run[begin:end].clone()])
    assert digest([torch.tensor([1, 0], dtype=torch.uint8)]) != digest([torch.tensor([1], dtype=torch.uint8)])
    assert digest([torch.ones(2), torch.ones(0)]) != digest([torch.ones(2)])
    assert digest([torch.randn(3, 4).t()[::2]]) >= 0


def test_digest_is_pinned() -> None:
    """Ranks of one job may run on different machines, and checkpoints have digests of their parts."""
    assert digest([torch.arange(1000), torch.ones(3)]) == 3565429518920575693
    assert digest([torch.arange(_BLOCK_WORDS + 3 * _ROW_WORDS + 5)]) == 5516490867844121283


@pytest.mark.parametrize("count", [1, _ROW_WORDS - 1, _ROW_WORDS, 2 * _ROW_WORDS + 3, _BLOCK_WORDS])
def test_rows_of_a_block_are_weighted_by_their_words_places(count: int) -> None:
    words = torch.randint(-(2**62), 2**62, (count,))
    defined = int((words * _weights(count, words.device)).sum())
    assert (_sum_on_host(words) - defined) % 2**64 == 0


def test_digests_on_the_host_keep_the_weights_of_one_row() -> None:
    _weights.cache_clear()
    digest([torch.arange(3 * _BLOCK_WORDS)])
    assert _weights.cache_info().currsize == 1
    _weights(_ROW_WORDS, torch.device("cpu"))
    assert _weights.cache_info().hits >= 1, "the weights that a digest keeps"
    assert _weights.cache_info().currsize == 1
