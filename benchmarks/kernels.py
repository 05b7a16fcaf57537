"""Measures the CPU's kernels beside memcpy of the same bytes, and the cost and gain of a block size.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --keep

One thread unless --threads says otherwise; its own processor time is what counts, so other processes' turns do not.
Bytes are those of the values that a kernel reads or writes (one_bit's error is among them: it is read and written with
them); compressed bytes are not counted, but for minmax_reduce, which sees no others. Kernels and memcpy take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import bagua_core.kernels as kernels
from benchmarks import result_file

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PEERS = 4
BLOCK_SIZES = (64, 256, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Row:
    """nbytes: of values. seconds: one per round, in turns with memcpy_s of the same bytes."""

    kernel: str
    dtype: str
    nbytes: int
    seconds: list[float]
    memcpy_s: list[float]

    @property
    def ratio(self) -> float:
        """Of bandwidths: 0.5 is half as fast as memcpy."""
        return statistics.median(self.memcpy_s) / statistics.median(self.seconds)

    def cells(self) -> list[str]:
        ours, theirs = (self.nbytes / statistics.median(s) / 1e9 for s in (self.seconds, self.memcpy_s))
        return [self.kernel, self.dtype, f"{ours:.1f}", f"{theirs:.1f}", f"{self.ratio:.2f}"]


def timed(work: Callable[[], object]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def memcpy(nbytes: int) -> Callable[[], object]:
    source = torch.ones(nbytes, dtype=torch.uint8)
    destination = torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: ctypes.memmove(destination.data_ptr(), source.data_ptr(), nbytes)


def measure(name: str, dtype: torch.dtype, nbytes: int, work: Callable[[], object], rounds: int) -> Row:
    copy = memcpy(nbytes)
    work(), copy()
    pairs = [(timed(work), timed(copy)) for _ in range(rounds)]
    return Row(name, str(dtype).removeprefix("torch."), nbytes, [a for a, _ in pairs], [b for _, b in pairs])


def rows_of(dtype: torch.dtype, count: int, rounds: int) -> list[Row]:
    """Every kernel on `count` values."""
    size = count * dtype.itemsize
    x, y = torch.randn(count).to(dtype), torch.randn(count).to(dtype)
    out, error, zero = torch.empty_like(x), torch.zeros(count), torch.zeros_like(x)
    one, bits = kernels.minmax_compress(x), kernels.one_bit_compress(x, error.clone())
    many = one.expand(PEERS, -1).contiguous()
    reduced = torch.empty_like(one)
    parts = list(x.split(count // 50 + 1))

    def row(name: str, nbytes: int, work: Callable[[], object]) -> Row:
        return measure(name, dtype, nbytes, work, rounds)

    return [
        row("minmax_compress", size, lambda: kernels.minmax_compress(x, one)),
        row("minmax_decompress", size, lambda: kernels.minmax_decompress(one, out)),
        row("minmax_decompress, add", size, lambda: kernels.minmax_decompress(one, out, add=True)),
        row("one_bit_compress", size + 4 * count, lambda: kernels.one_bit_compress(x, error, bits)),
        row("one_bit_decompress", size, lambda: kernels.one_bit_decompress(bits, out)),
        row("one_bit_decompress, add", size, lambda: kernels.one_bit_decompress(bits, out, add=True)),
        row("flatten", size, lambda: kernels.flatten(parts, out)),
        row("weighted_average", 2 * size, lambda: kernels.weighted_average(zero, y, 0.5, 0.5)),
        row("add_difference", 3 * size, lambda: kernels.add_difference(zero, y, x, 0.5)),
        row(
            f"minmax_reduce, {PEERS} peers",
            PEERS * one.numel(),
            lambda: kernels.minmax_reduce(many, count, reduced, scale=1 / PEERS),
        ),
    ]


def error_of(values: Tensor, block_size: int) -> float:
    """Norm of the error over the norm of the values."""
    compressed = kernels.minmax_compress(values, block_size=block_size)
    decoded = kernels.minmax_decompress(compressed, torch.empty_like(values), block_size=block_size)
    return float((decoded - values).norm() / values.norm())


def block_rows(count: int, rounds: int) -> list[list[str]]:
    """What a block size costs in bytes and saves in error: equal scales throughout, and one for every 10,000 values."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(count, generator=generator)
    scales = torch.exp(2 * torch.randn(-(-count // 10_000), generator=generator))
    layered = plain * scales.repeat_interleave(10_000)[:count]
    rows = []
    for size in BLOCK_SIZES:
        seconds = [timed(lambda s=size: kernels.minmax_compress(plain, block_size=s)) for _ in range(rounds)]
        rows.append(
            [
                str(size),
                f"{100 * (kernels.minmax_bytes(count, size) / count - 1):.2f} %",
                f"{100 * error_of(plain, size):.2f} %",
                f"{100 * error_of(layered, size):.2f} %",
                f"{4 * count / statistics.median(seconds) / 1e9:.1f}",
            ]
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mebibytes", type=int, default=64, help="of fp32 values (default 64: beyond the caches)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/kernels-<date>")
    options = parser.parse_args(arguments)
    about = result_file.circumstances()
    torch.set_num_threads(options.threads)
    count = options.mebibytes * 2**20 // 4
    rows = [row for dtype in DTYPES for row in rows_of(dtype, count, options.rounds)]
    served = kernels.target()
    words = "\n".join(
        [
            f"Target: {served.name} ({served.reason}). Threads: {options.threads}. {count} values.",
            "",
            result_file.table(
                ["kernel", "dtype", "GB/s", "memcpy, GB/s", "ratio"], [r.cells() for r in rows]
            ),
            "",
            result_file.table(
                ["block_size", "headers", "error", "error, mixed scales", "compress, GB/s"],
                block_rows(count, options.rounds),
            ),
        ]
    )
    print(f"{result_file.in_words(about)}\n\n{words}")
    if options.keep:
        for path in result_file.keep("kernels", about, words, [asdict(row) for row in rows]):
            print(path.relative_to(result_file.ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
