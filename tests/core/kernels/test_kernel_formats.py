"""The sizes of compressed tensors, in Python and in the header."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagua_core.kernels import MINMAX_BLOCK, ONE_BIT_BLOCK, minmax_bytes, one_bit_bytes
from bagua_core.kernels.formats import BLOCK_STEP, LARGEST_BLOCK, minmax_payload_at, one_bit_payload_at
from bagua_core.kernels.on_cpu import CpuKernels

block_sizes = st.integers(1, LARGEST_BLOCK // BLOCK_STEP).map(lambda n: n * BLOCK_STEP)


def test_python_and_the_header_agree(extension: CpuKernels) -> None:
    @given(count=st.integers(0, 2**40), block_size=block_sizes)
    def agree(count: int, block_size: int) -> None:
        ours = (minmax_bytes(count, block_size), one_bit_bytes(count, block_size))
        assert extension.sizes(count, block_size) == ours

    agree()


@given(count=st.integers(0, 2**40), block_size=block_sizes)
def test_parts_are_aligned_and_large_enough(count: int, block_size: int) -> None:
    blocks = -(-count // block_size)
    for payload_at, size, header, payload in (
        (minmax_payload_at(count, block_size), minmax_bytes(count, block_size), 8 * blocks, count),
        (one_bit_payload_at(count, block_size), one_bit_bytes(count, block_size), 4 * blocks, -(-count // 8)),
    ):
        assert payload_at % 16 == 0 and size % 16 == 0
        assert header <= payload_at < header + 16
        assert payload_at + payload <= size < payload_at + payload + 16


def test_headers_cost_less_than_a_hundredth() -> None:
    count = 1 << 20
    assert minmax_payload_at(count, MINMAX_BLOCK) < 0.01 * count
    assert one_bit_payload_at(count, ONE_BIT_BLOCK) < 0.01 * count / 8
