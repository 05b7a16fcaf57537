"""Reports whether an NCCL program started from here would load Bagua-Net, and what the plugin would use."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from bagua_contract.net_variables import KEEPS_LOADED

INTERFACE_VERSIONS = "6 to 12"
_INIT, _DEVICES, _PROPERTIES = 1, 2, 3  # members of the table of version 6


class _Properties(ctypes.Structure):
    """The struct PropertiesV6 of plugin/nccl_net.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("pci_path", ctypes.c_char_p),
        ("guid", ctypes.c_uint64),
        ("pointer_support", ctypes.c_int),
        ("speed_mbps", ctypes.c_int),
        ("port", ctypes.c_int),
        ("latency_us", ctypes.c_float),
        ("max_communicators", ctypes.c_int),
        ("max_receives", ctypes.c_int),
    )


def why_inactive(environ: Mapping[str, str], library: Path) -> str:
    """Returns why NCCL would not load and keep `library`, by the environment of a program; empty if it would."""
    named = environ.get("NCCL_NET_PLUGIN", "")
    if named != str(library):
        if named not in ("bagua", library.name):
            return f"NCCL_NET_PLUGIN is {named!r}" if named else "NCCL_NET_PLUGIN is not set"
        if str(library.parent) not in environ.get("LD_LIBRARY_PATH", "").split(":"):
            return f"LD_LIBRARY_PATH lacks {library.parent}"
    for name, value in KEEPS_LOADED.items():
        if environ.get(name) != value:
            return f"{name} is not {value}: NCCL would unload it with the last communicator"
    return ""


def interfaces(library: Path) -> list[str]:
    """Returns one line for each NIC that the plugin finds. Raises OSError."""
    table = (ctypes.c_void_p * 17).in_dll(ctypes.CDLL(str(library)), "ncclNetPlugin_v6")
    init = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(table[_INIT] or 0)
    devices = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(table[_DEVICES] or 0)
    describe = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(table[_PROPERTIES] or 0)
    count = ctypes.c_int()
    if init(None) != 0 or devices(ctypes.addressof(count)) != 0:
        return []
    lines = []
    for device in range(count.value):
        properties = _Properties()
        if describe(device, ctypes.addressof(properties)) == 0:
            lines.append(f"{properties.name.decode()}, {properties.speed_mbps} Mbit/s")
    return lines


def report(library: Path, compiler: str) -> bool:
    """Prints the report. Returns whether the plugin is active and finds a NIC."""
    reason, found = why_inactive(os.environ, library), interfaces(library)
    print(f"active: {f'no, {reason}; use eval $(python -m bagua_core.net env)' if reason else 'yes'}")
    print(f"plugin: {library}, interface versions {INTERFACE_VERSIONS}, compiler {compiler}")
    for device, line in enumerate(found):
        print(f"NIC {device}: {line}")
    if not found:
        print("no NIC: see NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY")
    for name in sorted(name for name in os.environ if name.startswith("BAGUA_NET_")):
        print(f"{name}={os.environ[name]}")
    return not reason and bool(found)
