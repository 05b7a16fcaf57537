"""Values come back as they were, or are refused; bytes that no encoder wrote are unreadable and nothing worse."""

from __future__ import annotations

import collections
import json
import math
import os
import pickle
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_core.cache.checksum import checksums
from bagua_core.cache.errors import NotCacheableError, UnreadableError
from bagua_core.cache.frames import (
    CHECKED_FROM,
    FORMAT,
    FRAME,
    MAGIC,
    Unreadable,
    decode_many,
    encode,
    padded,
)
from bagua_core.cache.keys import digest_of

KEY = digest_of("a key")


def decode(frame: Any, key: bytes, allow_pickle: bool = False) -> Any:
    (value,) = decode_many([frame], [key], allow_pickle)
    if isinstance(value, Unreadable):
        raise value.error
    return value


class Point(NamedTuple):
    x: Any
    y: Any


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b) if t.numel()]
        return a.dtype == b.dtype and a.shape == b.shape and (not raw or torch.equal(*raw))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return bool(a == b)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip
SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(torch.float32).to(dtype),
    SHAPES,
    st.sampled_from(DTYPES),
)
ARRAYS = st.builds(
    lambda shape, dtype: np.arange(math.prod(shape)).reshape(shape).astype(dtype),
    SHAPES,
    st.sampled_from(["<f4", ">f8", "|u1", "<i2", "<c16", "<f2", "|b1", "<U3", "|S2", "<M8[ns]"]),
)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers(allow_nan=False) | st.text()
    | st.binary() | TENSORS | ARRAYS | st.builds(np.float32, st.floats(width=32))
    | st.builds(np.int64, st.integers(-9, 9))
)  # fmt: skip
KEYS = st.text(max_size=3) | st.integers() | st.binary(max_size=2) | st.none() | st.floats(allow_nan=False)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Point, inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=500)
@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(decode(encode(value, KEY), KEY), value)


@settings(max_examples=150)
@given(st.lists(VALUES, max_size=6), st.data())
def test_many_at_once_are_the_same_as_one_by_one(values: list[Any], data: st.DataObject) -> None:
    repeated = data.draw(st.lists(st.sampled_from(values), max_size=6)) if values else []
    both = values + repeated
    keys = [digest_of(i) for i in range(len(both))]
    read = decode_many([encode(value, key) for value, key in zip(both, keys, strict=True)], keys)
    assert all(map(same, read, both)) and len(read) == len(both)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(
    "numbers", [[1, 2, 3], [0.5, -0.0], [1, 2.0], [1, True], [1 << 70, 1], [5], [-(1 << 63), 0]]
)
def test_lists_of_numbers(kind: type, numbers: list[Any]) -> None:
    assert same(decode(encode(kind(numbers), KEY), KEY), kind(numbers))


def test_a_list_of_tokens_is_one_leaf() -> None:
    tokens = list(range(1000))
    assert len(encode(tokens, KEY)) < 8 * len(tokens) + 200


def test_what_is_read_is_the_callers_own() -> None:
    frame = encode((torch.zeros(4), np.zeros(4), torch.ones(2)), KEY)
    before = bytes(frame)
    first, array, other = decode(frame, KEY)
    first += 1
    array += 1
    assert other.tolist() == [1, 1] and bytes(frame) == before
    assert decode(frame, KEY)[0].tolist() == [0, 0, 0, 0]


def test_samples_of_one_batch_are_apart() -> None:
    keys = [digest_of(i) for i in range(8)]
    read = decode_many(
        [encode((torch.full((5,), float(i)), np.full(3, i), i), k) for i, k in enumerate(keys)], keys
    )
    read[3][0].fill_(99)
    read[3][1][:] = 99
    for i, (tensor, array, number) in enumerate(read):
        if i != 3:
            assert tensor.tolist() == [i] * 5 and array.tolist() == [i] * 3 and number == i


def test_memory_is_used_again_only_when_no_reader_holds_any_of_it() -> None:
    keys = [digest_of(i) for i in range(8)]
    frames = [encode((torch.full((9000,), float(i)), np.full(9, i)), k) for i, k in enumerate(keys)]
    places = set()
    for _ in range(5):
        read = decode_many(frames, keys)
        places.add(read[0][0].data_ptr())
        del read
    assert len(places) == 1
    held: list[Any] = [decode_many(frames, keys)[i % 8][i % 2] for i in range(16)]
    for i, part in enumerate(held):
        assert (part == i % 8).all(), "a part that is held stays what it is"


def test_views_are_kept_as_what_they_show() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for view in (base.t(), base[:, 1], base.expand(2, 3, 4), torch.complex(base, base).conj(), base[1:1]):
        assert same(decode(encode(view, KEY), KEY), view.resolve_conj().contiguous())


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, {2}]}, r"the value\['a'\]\[1\] is a builtins.set"),
        (torch.zeros(2, requires_grad=True), "requires_grad=True"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.nn.Parameter(torch.zeros(1)), "Parameter"),
        (np.array([object()]), "NumPy array of object"),
        (np.zeros(2, dtype=[("a", "i4")]), "NumPy array of"),
        (collections.OrderedDict(), "OrderedDict"),
        ({frozenset(): 3}, "has the key"),
        (collections.namedtuple("Hidden", "a")(1), "no named tuple"),
    ],
)
def test_what_would_come_back_otherwise_is_refused(value: Any, words: str) -> None:
    with pytest.raises(NotCacheableError, match=words):
        encode(value, KEY)


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotCacheableError, match="contains itself"):
        encode(loop, KEY)
    deep: Any = 0
    for _ in range(300):
        deep = [deep]
    with pytest.raises(NotCacheableError, match="nested"):
        encode(deep, KEY)


def test_pickle_only_when_asked_for_on_both_sides() -> None:
    value = {"a": {1, 2}}
    frame = encode(value, KEY, allow_pickle=True)
    assert decode(frame, KEY, allow_pickle=True) == value
    with pytest.raises(UnreadableError, match="pickle=True was not asked for"):
        decode(frame, KEY)
    plain = encode([1, "a"], KEY, allow_pickle=True)
    assert decode(plain, KEY) == [1, "a"], "what has a form of its own is not pickled"
    with pytest.raises(NotCacheableError, match="is not pickled"):
        encode(lambda: 0, KEY, allow_pickle=True)


def test_a_named_tuple_that_is_gone_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(Point(1, 2), KEY)
    assert decode(frame, KEY) == Point(1, 2)
    import sys

    monkeypatch.delattr(sys.modules[__name__], "Point")
    with pytest.raises(UnreadableError, match="which this script does not have"):
        decode(frame, KEY)


# -- damage

SAMPLE = (torch.arange(3000.0), 7, "text", [1, 2, 3])


@settings(max_examples=300)
@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    frame = encode(SAMPLE, KEY)
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(UnreadableError):
        decode(frame, KEY)


@settings(max_examples=100)
@given(st.integers(0, 20000))
def test_any_cut_is_noticed(length: int) -> None:
    frame = encode(SAMPLE, KEY)
    if length < len(frame):
        with pytest.raises(UnreadableError):
            decode(frame[:length], KEY)


def test_pages_that_are_exchanged_lost_or_anothers_are_noticed() -> None:
    frame = encode(torch.randn(4096), KEY)
    pages = [frame[i : i + 4096] for i in range(0, len(frame), 4096)]
    exchanged = b"".join([pages[0], pages[2], pages[1], *pages[3:]])
    lost = b"".join([pages[0], bytes(4096), *pages[2:]])
    for damaged in (exchanged, lost):
        assert len(damaged) == len(frame)
        with pytest.raises(UnreadableError, match="checksum"):
            decode(damaged, KEY)
    with pytest.raises(UnreadableError, match="another key"):
        decode(frame, digest_of("another"))


def test_one_damaged_frame_among_many_costs_itself() -> None:
    keys = [digest_of(i) for i in range(6)]
    frames = [encode((torch.full((100,), float(i)), i), k) for i, k in enumerate(keys)]
    frames[2][200] ^= 1
    frames[4] = encode((torch.zeros(100), 4), digest_of(99))
    read = decode_many(frames, keys)
    assert [type(value) is Unreadable for value in read] == [i in (2, 4) for i in range(6)]
    assert all(same(read[i], (torch.full((100,), float(i)), i)) for i in (0, 1, 3, 5))


def test_whole_frames_under_each_others_keys_are_noticed() -> None:
    keys = [digest_of(i) for i in range(4)]
    frames = [encode((torch.full((100,), float(i)), i), k) for i, k in enumerate(keys)]
    read = decode_many(frames, [keys[0], keys[2], keys[1], keys[3]])
    assert [type(value) is Unreadable for value in read] == [False, True, True, False]


def framed(text: bytes, payload: bytes, key: Any = KEY) -> bytearray:
    """A frame with a right checksum around anything: what the decoder must stand."""
    head = padded(FRAME.size + len(text))
    frame = bytearray(head + padded(len(payload)))
    FRAME.pack_into(frame, 0, 0, MAGIC, FORMAT, key, len(frame), len(text))
    frame[FRAME.size : FRAME.size + len(text)] = text
    frame[head : head + len(payload)] = payload
    words = np.frombuffer(frame, dtype=np.uint64, offset=CHECKED_FROM).reshape(1, -1)
    struct.pack_into("<Q", frame, 0, int(checksums(words)[0]))
    return frame


def readable_or_not(frame: Any) -> None:
    for value in decode_many([frame, frame], [KEY, KEY]):
        assert not isinstance(value, Unreadable) or isinstance(value.error, UnreadableError)


@settings(max_examples=500)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_value_or_unreadable(data: bytes) -> None:
    readable_or_not(data)
    readable_or_not(framed(data, b""))


SMALL = st.integers(-2, 70) | st.sampled_from([1 << 31, 1 << 47, 1 << 62, 1 << 64])
WORDS = st.sampled_from(
    ["float32", "bool", "int64", "qint8", "save", "load", "__class__", "<f4", "|O8", "<V8", "<U2", "|S0", "<M8[ns]",
     "<i8", "|u1", "f4,f4", "os", "system", "builtins", "tuple", __name__, "Point", "<", ""]
)  # fmt: skip
TAGS = st.sampled_from(
    [*"tagnmisypx", "tuple", "dict", "counter", "named", "float", "bytes", "size", "dtype", "device", ""]
)  # fmt: skip
PARTS = st.lists(st.tuples(WORDS, st.lists(SMALL, max_size=3) | SMALL), max_size=3) | WORDS | SMALL
TREES = st.recursive(
    st.none() | SMALL | WORDS | st.builds(lambda tag, part: {tag: part}, TAGS, st.integers(-1, 3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(
            lambda tag, content: {tag: content},
            TAGS,
            st.lists(inner, max_size=3) | st.lists(st.tuples(inner, inner), max_size=2),
        )
        | st.builds(
            lambda name, items: {"named": [__name__, name, items]}, WORDS, st.lists(inner, max_size=3)
        )
    ),
    max_leaves=8,
)


@settings(max_examples=800)
@given(PARTS, TREES, st.integers(0, 200))
def test_any_layout_is_a_value_or_unreadable(parts: Any, tree: Any, size: int) -> None:
    text = json.dumps([parts, tree]).encode()
    readable_or_not(framed(text, bytes(size)))
    readable_or_not(framed(text, os.urandom(size)))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"[" * 500 + b"]" * 500,
        b"[[]," + b"[" * 900 + b"]" * 900 + b"]",
        b"[[]," + b'{"tuple":[' * 400 + b"]}" * 400 + b"]",
        b"1e999",
        b"\xff",
        b"",
    ],
)
def test_layouts_without_end(text: bytes) -> None:
    with pytest.raises(UnreadableError):
        decode(framed(text, b""), KEY)


@pytest.mark.parametrize(
    "part",
    [["float32", [1 << 40]], ["uint8", [1 << 47, 0]], ["|u1", [1 << 40]], ["<i8", [1 << 40]], ["<i8", [-1]]],
)
@pytest.mark.parametrize("tag", ["t", "a", "n", "s"])
def test_a_layout_takes_no_memory_that_the_frame_has_not(part: Any, tag: str) -> None:
    (value,) = decode_many([framed(json.dumps([[part], {tag: 0}]).encode(), b"")], [KEY])
    assert isinstance(value, Unreadable) or 0 in value.shape


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_in_the_cache_runs_nothing(tmp_path: Path) -> None:
    raw = pickle.dumps(Evil(tmp_path / "ran"))
    layout = json.dumps([[["|u1", [len(raw)]]], {"p": 0}]).encode()
    (value,) = decode_many([framed(layout, raw)], [KEY])
    assert isinstance(value, Unreadable) and "was not asked for" in str(value.error)
    assert not (tmp_path / "ran").exists()


def test_keys_of_different_kinds_are_different() -> None:
    keys = [0, 1, "0", b"0", "1", -1, 1 << 64, (1 << 64) + 1, "", b"", "i-1", b"-1"]
    assert len({digest_of(key) for key in keys}) == len(keys)
    assert bytes(16) not in {digest_of(key) for key in keys}
    with pytest.raises(TypeError, match=r"1\.5"):
        digest_of(1.5)  # type: ignore[arg-type]
