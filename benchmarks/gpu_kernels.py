"""Measures the CUDA kernels beside a copy on the same device. Needs a GPU and CuPy.

    python -m benchmarks.gpu_kernels --keep

Bytes are all that a kernel must read and write in memory, compressed ones included, and the copy's likewise. So the
ratio says how much of the copy's bandwidth a kernel reaches (0.8 is the aim). Times are of the device, between events;
medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

import bagua_core.kernels as kernels
from benchmarks import result_file

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PEERS = 4
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Row:
    """nbytes: read and written by one call."""

    kernel: str
    dtype: str
    nbytes: int
    seconds: list[float]

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.nbytes / statistics.median(self.seconds)


def measure(name: str, dtype: torch.dtype, nbytes: int, work: Callable[[], object], rounds: int) -> Row:
    for _ in range(WARM_UP):
        work()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)
    ]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1e3 for start, end in events]
    return Row(name, str(dtype).removeprefix("torch."), nbytes, seconds)


def rows_of(dtype: torch.dtype, count: int, rounds: int) -> list[Row]:
    """The copy first, then every kernel."""
    size = count * dtype.itemsize
    x = torch.randn(count, device="cuda").to(dtype)
    y, out, zero = torch.randn(count, device="cuda").to(dtype), torch.empty_like(x), torch.zeros_like(x)
    error = torch.zeros(count, device="cuda")
    one, bits = kernels.minmax_compress(x), kernels.one_bit_compress(x, error.clone())
    many = one.expand(PEERS, -1).contiguous()
    reduced = torch.empty_like(one)
    parts = list(x.split(count // 200 + 1))
    code, sign = one.numel(), bits.numel()

    def row(name: str, nbytes: int, work: Callable[[], object]) -> Row:
        return measure(name, dtype, nbytes, work, rounds)

    return [
        row("copy", 2 * size, lambda: out.copy_(x)),
        row("minmax_compress", size + code, lambda: kernels.minmax_compress(x, one)),
        row("minmax_decompress", size + code, lambda: kernels.minmax_decompress(one, out)),
        row(
            f"minmax_reduce, {PEERS} peers",
            (PEERS + 1) * code,
            lambda: kernels.minmax_reduce(many, count, reduced, scale=1 / PEERS),
        ),
        row(
            f"minmax_reduce_values, {PEERS} peers",
            PEERS * code + size,
            lambda: kernels.minmax_reduce_values(many, out, scale=1 / PEERS),
        ),
        row("one_bit_compress", size + 8 * count + sign, lambda: kernels.one_bit_compress(x, error, bits)),
        row("one_bit_decompress", size + sign, lambda: kernels.one_bit_decompress(bits, out)),
        row("flatten", 2 * size, lambda: kernels.flatten(parts, out)),
        row("weighted_average", 3 * size, lambda: kernels.weighted_average(zero, y, 0.5, 0.5)),
        row("add_difference", 4 * size, lambda: kernels.add_difference(zero, y, x, 0.5)),
    ]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    copy = rows[0].bandwidth
    return [[r.kernel, r.dtype, f"{r.bandwidth / 1e9:.0f}", f"{r.bandwidth / copy:.2f}"] for r in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mebibytes", type=int, default=1024, help="of fp32 values (default 1024)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/gpu_kernels-<date>")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "no CUDA device: this benchmark needs a GPU and CuPy (bagua-elastic[cuda13]); "
            "`python -m benchmarks.kernels` measures the CPU's kernels",
            file=sys.stderr,
        )
        return 2
    try:
        served = kernels.target("cuda")
    except kernels.KernelUnavailableError as error:
        print(error, file=sys.stderr)
        return 2
    about = result_file.circumstances() | {"gpu": torch.cuda.get_device_name()}
    count = options.mebibytes * 2**20 // 4
    rows = [rows_of(dtype, count, options.rounds) for dtype in DTYPES]
    words = "\n".join(
        [
            f"{about['gpu']}, {served.reason}. {count} values.",
            "",
            result_file.table(
                ["kernel", "dtype", "GB/s", "of the copy"], [line for group in rows for line in cells(group)]
            ),
        ]
    )
    print(f"{result_file.in_words(about)}\n\n{words}")
    if options.keep:
        values = [asdict(row) for group in rows for row in group]
        for path in result_file.keep("gpu_kernels", about, words, values):
            print(path.relative_to(result_file.ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
