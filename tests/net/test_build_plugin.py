"""The compiled plugin moves messages through its C interface (version 8) over loopback, in one process."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagua_core.kernels.compilation import CompilationError
from bagua_core.net import build
from bagua_core.net.check import interfaces, why_inactive
from tests.docs.printed import printed_block
from tests.lab.wait import HANG_S
from tests.net.conftest import MakeDriver

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

P = ctypes.c_void_p
V8 = [
    "name",
    "init",
    "devices",
    "getProperties",
    "listen",
    "connect",
    "accept",
    "regMr",
    "regMrDmaBuf",
    "deregMr",
]
V8 += [
    "isend",
    "irecv",
    "iflush",
    "test",
    "closeSend",
    "closeRecv",
    "closeListen",
    "getDeviceMr",
    "irecvConsumed",
]


class Plugin:
    """The functions of the table of version 8, by name; each result but 0 raises."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.table = (P * len(V8)).in_dll(self.library, "ncclNetPlugin_v8")

    def call(self, name: str, *arguments: Any) -> int:
        types = [type(a) if isinstance(a, ctypes._SimpleCData) else P for a in arguments]
        function = ctypes.CFUNCTYPE(ctypes.c_int, *types)(self.table[V8.index(name)])
        return function(
            *[a if isinstance(a, ctypes._SimpleCData) else ctypes.addressof(a) for a in arguments]
        )

    def connected(self) -> tuple[P, P, P]:
        handle, listener, sender, receiver = ctypes.create_string_buffer(128), P(), P(), P()
        assert self.call("init", P()) == 0
        assert self.call("listen", ctypes.c_int(0), handle, Out(listener).box) == 0
        deadline = time.monotonic() + 30
        out_sender, out_receiver = Out(sender), Out(receiver)
        while not (sender.value and receiver.value):
            assert time.monotonic() < deadline
            if not sender.value:
                assert self.call("connect", ctypes.c_int(0), handle, out_sender.box, P()) == 0
            if not receiver.value:
                assert self.call("accept", listener, out_receiver.box, P()) == 0
        return listener, sender, receiver

    def send(self, sender: P, data: Any, size: int, tag: int = 0) -> P:
        request = P()
        assert (
            self.call("isend", sender, data, ctypes.c_int(size), ctypes.c_int(tag), P(), request_box(request))
            == 0
        )
        return request

    def receive(self, receiver: P, buffers: list[Any], sizes: list[int], tags: list[int]) -> P:
        request, n = P(), len(buffers)
        pointers = (P * n)(*[ctypes.addressof(b) for b in buffers])
        arguments = (
            pointers,
            (ctypes.c_int * n)(*sizes),
            (ctypes.c_int * n)(*tags),
            P(),
            request_box(request),
        )
        assert self.call("irecv", receiver, ctypes.c_int(n), *arguments) == 0
        return request

    def wait(self, requests: list[P]) -> list[int]:
        """The result of the first failure, or the sizes of each request's first buffer."""
        sizes, open_requests = [0] * len(requests), dict(enumerate(requests))
        deadline = time.monotonic() + 60
        while open_requests:
            assert time.monotonic() < deadline
            for i, request in list(open_requests.items()):
                done, size = ctypes.c_int(0), (ctypes.c_int * 8)()
                box = (ctypes.c_int * 1)()
                result = self.call("test", request, box, size)
                done.value = box[0]
                if result:
                    return [-result]
                if done.value:
                    sizes[i] = size[0]
                    del open_requests[i]
        return sizes


class Out:
    def __init__(self, pointer: P) -> None:
        self.box = request_box(pointer)


def request_box(pointer: P) -> Any:
    """A pointer's own memory, as an array, so that `Plugin.call` passes its address."""
    return (ctypes.c_char * 8).from_buffer(pointer)


def quick_compiler(directory: Path) -> Path:
    """c++ that does not optimize, which takes half of a compilation's processor time."""
    script = directory / "quick-c++"
    script.write_text(f'#!/bin/sh\nexec {shutil.which("c++")} "$@" -O0\n')
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache into which the plugin is compiled; the plugin finds loopback."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_SOCKET_IFNAME", "lo")
        patch.delenv("NCCL_NET_PLUGIN", raising=False)
        directory = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(directory))
        patch.setenv("CXX", str(quick_compiler(directory)))
        yield directory


@pytest.fixture(scope="module")
def plugin(cache: Path) -> Plugin:
    return Plugin(build.library())


@pytest.mark.parametrize("size", [0, 1, 4057, 65536, 1_000_003, 16 << 20])
def test_messages_arrive_whole(plugin: Plugin, size: int) -> None:
    listener, sender, receiver = plugin.connected()
    payload = os.urandom(size)
    source, target = ctypes.create_string_buffer(payload, size + 1), ctypes.create_string_buffer(size + 1)
    for _ in range(3):
        ctypes.memset(target, 0, size + 1)
        requests = [
            plugin.receive(receiver, [target], [size], [0]),
            plugin.send(sender, source, size),
        ]
        assert plugin.wait(requests) == [size, size]
        assert target.raw[:size] == payload
    for name, comm in (("closeSend", sender), ("closeRecv", receiver), ("closeListen", listener)):
        assert plugin.call(name, comm) == 0


def test_tags_of_a_group_find_their_buffers_in_any_order(plugin: Plugin) -> None:
    listener, sender, receiver = plugin.connected()
    sources = [ctypes.create_string_buffer(bytes([65 + i]) * 300_000) for i in range(4)]
    targets = [ctypes.create_string_buffer(300_001) for _ in range(4)]
    sends = [plugin.send(sender, sources[i], 300_000, tag=i) for i in (3, 1, 0, 2)]
    receives = [plugin.receive(receiver, targets[i : i + 2], [300_000] * 2, [i, i + 1]) for i in (0, 2)]
    assert plugin.wait([*sends, *receives]) == [300_000] * 6
    assert [t.raw[:300_000] for t in targets] == [s.raw[:300_000] for s in sources]
    for name, comm in (("closeSend", sender), ("closeRecv", receiver), ("closeListen", listener)):
        assert plugin.call(name, comm) == 0


def test_a_peer_that_ends_in_a_message_fails_the_request(plugin: Plugin) -> None:
    listener, sender, receiver = plugin.connected()
    target = ctypes.create_string_buffer(1000)
    request = plugin.receive(receiver, [target], [1000], [0])
    assert plugin.call("closeSend", sender) == 0
    assert plugin.wait([request]) == [-6]
    assert plugin.call("closeRecv", receiver) == 0
    assert plugin.call("closeListen", listener) == 0


def test_without_a_compiler_the_message_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        CompilationError, match=r"no C\+\+ compiler \(no-such-compiler\) on PATH; install one"
    ):
        build.find_compiler()


def test_the_environment_names_the_compiled_library_and_the_check_finds_it(
    cache: Path, plugin: Plugin
) -> None:
    lines = printed_block("docs/bagua-net.md", "bagua_core.net env").text.splitlines()
    (environment,) = (line for line in lines if "bagua_core.net env" in line)
    (check,) = (line for line in lines if "bagua_core.net check" in line)
    program = "\n".join((f'python() {{ "{sys.executable}" "$@"; }}', environment, "env", check))
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True, timeout=HANG_S)
    (library,) = cache.glob(f"bagua-kernels/net-*/{build.FILE_NAME}")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert {"NCCL_NET_PLUGIN=bagua", "NCCL_NET_PLUGIN_REF_COUNT=1", "active: yes"} <= set(said)
    assert any(line.startswith(f"LD_LIBRARY_PATH={library.parent}") for line in said)


def test_the_check_says_whether_nccl_would_load_the_plugin(plugin: Plugin, cache: Path) -> None:
    library = Path("/cache/net-1/libnccl-net-bagua.so")
    kept = {"NCCL_NET_PLUGIN_REF_COUNT": "1"}
    named = {"NCCL_NET_PLUGIN": "bagua", **kept}
    assert why_inactive({}, library) == "NCCL_NET_PLUGIN is not set"
    assert why_inactive({"NCCL_NET_PLUGIN": "aws"}, library) == "NCCL_NET_PLUGIN is 'aws'"
    assert why_inactive(named, library) == "LD_LIBRARY_PATH lacks /cache/net-1"
    assert why_inactive({**named, "LD_LIBRARY_PATH": "/x:/cache/net-1"}, library) == ""
    assert why_inactive({"NCCL_NET_PLUGIN": str(library), **kept}, library) == ""
    assert "would unload it" in why_inactive({"NCCL_NET_PLUGIN": str(library)}, library)
    assert interfaces(build.library()) == ["lo, 10000 Mbit/s"]
    done = subprocess.run(
        [sys.executable, "-m", "bagua_core.net", "check"], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 1
    assert done.stdout.startswith("active: no, NCCL_NET_PLUGIN is not set; use eval")


def test_nccl_loads_and_assigns_the_plugin(plugin: Plugin, make_driver: MakeDriver) -> None:
    driver = make_driver("assigned", NCCL_NET_PLUGIN=str(build.library()))
    assert driver.network == "Bagua"
    assert driver.ask("devices") == ["1"]
