"""Kernels start on torch's stream and device, and leave both as they were; by fakes of CuPy and torch.cuda."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_core.kernels import KernelUnavailableError, cupy_launcher, targets
from bagua_core.kernels.cupy_launcher import KEPT_TABLES, CupyLauncher
from bagua_core.kernels.on_gpu import HEADER, SOURCE, compile_flags

GPU = torch.device("cuda", 1)


class Notes:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.loaded: list[bytes] = []

    def compile(self, source: str, options: tuple[str, ...]) -> tuple[bytes, None]:
        self.compiled.append((source, options))
        return b"code %d" % len(self.compiled), None

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        self.lines.append(f"enter {what}")
        yield
        self.lines.append(f"leave {what}")


class TorchStream:
    def __init__(self, address: int) -> None:
        self.cuda_stream = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Notes:
    made = Notes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: made.within(f"torch's device {index}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: TorchStream(77))
    return made


def install_cupy(monkeypatch: pytest.MonkeyPatch, notes: Notes, with_protocol: bool) -> None:
    cupy: Any = ModuleType("cupy")

    class Stream:
        pass

    if with_protocol:
        Stream.from_external = staticmethod(  # type: ignore[attr-defined]
            lambda stream: notes.within(f"stream {stream.__cuda_stream__()[1]} by the protocol")
        )

    def external(address: int, index: int) -> Any:
        assert not with_protocol, "CuPy 14 warns of it"
        return notes.within(f"stream {address} of device {index} by its address")

    def kernel(*_: Any) -> None:
        notes.lines.append("kernel")

    cupy.__version__ = "14.0"
    cupy.RawModule = lambda **_: pytest.fail("it has denormals read as 0")
    cupy.cuda = SimpleNamespace(
        Module=lambda: SimpleNamespace(load=notes.loaded.append, get_function=lambda name: kernel),
        nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
        compiler=SimpleNamespace(compile_using_nvrtc=notes.compile),
        Stream=Stream,
        ExternalStream=external,
        Device=lambda _: pytest.fail("it selects device 0 on leaving"),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)


@pytest.mark.parametrize(
    ("with_protocol", "stream"),
    [(True, "stream 77 by the protocol"), (False, "stream 77 of device 1 by its address")],
)
def test_a_kernel_starts_on_torchs_stream_with_torchs_guard(
    with_protocol: bool, stream: str, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_cupy(monkeypatch, notes, with_protocol)
    CupyLauncher().launch(GPU, "bagua_decode", 1, 4, [])
    assert notes.lines == [
        "enter torch's device 1",
        f"enter {stream}",
        "kernel",
        f"leave {stream}",
        "leave torch's device 1",
    ]


def test_kernels_are_compiled_once_with_our_options_and_anew_for_other_sources(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_cupy(monkeypatch, notes, True)

    def launch() -> None:
        CupyLauncher().launch(GPU, "bagua_decode", 2, 4, [])

    launch()
    launch()
    assert notes.compiled == [(SOURCE.read_text(), compile_flags(2))]
    assert notes.loaded == [b"code 1", b"code 1"], "the second process finds it"
    monkeypatch.setattr(cupy_launcher, "HEADER", tmp_path / "arithmetic.h")
    cupy_launcher.HEADER.write_text(HEADER.read_text() + "\n")
    launch()
    assert notes.loaded[-1] == b"code 2"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    launch()
    assert notes.loaded[-1] == b"code 3"


def test_kernels_that_were_damaged_in_the_cache_are_compiled_anew(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_cupy(monkeypatch, notes, True)
    CupyLauncher().launch(GPU, "bagua_decode", 1, 4, [])
    (kept,) = (tmp_path / "cache").rglob("cuda-*.bin")
    kept.write_bytes(b"")
    for _ in range(2):
        CupyLauncher().launch(GPU, "bagua_decode", 1, 4, [])
    assert notes.loaded == [b"code 1", b"code 2", b"code 2"]


def test_a_process_that_compiles_without_end_holds_up_no_other(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    install_cupy(monkeypatch, notes, True)
    monkeypatch.setattr(cupy_launcher, "WAIT_S", 0.0)
    CupyLauncher().launch(GPU, "bagua_decode", 1, 4, [])
    (kept,) = (tmp_path / "cache").rglob("cuda-*.bin")
    kept.unlink()
    with open(f"{kept}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        CupyLauncher().launch(GPU, "bagua_decode", 1, 4, [])
    assert notes.loaded == [b"code 1", b"code 2"]
    assert "another process" in caplog.text


def test_without_a_private_cache_kernels_are_compiled_by_each_process(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    install_cupy(monkeypatch, notes, True)
    (tmp_path / "cache").write_text("no directory")
    CupyLauncher().launch(GPU, "bagua_decode", 1, 4, [])
    assert notes.loaded == [b"code 1"]
    assert "can't be kept" in caplog.text


def test_a_table_is_kept_for_every_stream_that_reads_it(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that makes room for others may still be read, and not only by the stream that is current then."""
    install_cupy(monkeypatch, notes, True)
    kept: list[tuple[int, int]] = []

    def record_stream(table: torch.Tensor, stream: TorchStream) -> None:
        kept.append((int(table[0]), stream.cuda_stream))

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    launcher, cpu = CupyLauncher(), torch.device("cpu")
    for address in (77, 88):
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device, address=address: TorchStream(address)
        )
        launcher.table([5], cpu)
    assert kept == [(5, 77), (5, 88)]
    for number in range(KEPT_TABLES + 10):
        launcher.table([number], cpu)
    assert len(launcher._tables) == KEPT_TABLES


def test_without_cupy_torchs_operators_serve_unless_kernels_are_demanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    choose = targets._cuda.__wrapped__
    target, _ = choose("auto")
    assert target.name == "fallback" and "need CuPy" in target.reason
    with pytest.raises(KernelUnavailableError, match="need CuPy"):
        choose("extension")
