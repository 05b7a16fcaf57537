"""Reads the facts of this node: the number of GPUs and processors, addresses, and ignored signals.

Asks the system without torch or CUDA, and only when a request needs to know.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from typing import Protocol

from bagua_agent.base.driver_gpus import gpus_of_the_driver
from bagua_agent.node.listening_address import is_this_host
from bagua_launch.errors import RequestError

_NVIDIA_SMI_TIMEOUT_S = 20.0


class NodeFacts(Protocol):
    def gpu_count(self) -> int: ...

    def cpu_count(self) -> int: ...

    def owns_address(self, host: str) -> bool:
        """Tells whether `host` names one of this node's addresses."""
        ...

    def ignores(self, signal_name: str) -> bool:
        """Tells whether this process was started with the signal ignored, as nohup does with SIGHUP."""
        ...


class ThisNode:
    """The node this process runs on."""

    def gpu_count(self) -> int:
        """Returns how many GPUs a worker started here would see. Raises RequestError if the driver does not answer."""
        installed = _installed_gpus()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return installed if visible is None else min(installed, _named_devices(visible))

    def cpu_count(self) -> int:
        return len(os.sched_getaffinity(0))

    def owns_address(self, host: str) -> bool:
        return is_this_host(host, socket.gethostname())

    def ignores(self, signal_name: str) -> bool:
        return signal.getsignal(signal.Signals[signal_name]) is signal.SIG_IGN


def _installed_gpus() -> int:
    # nvidia-smi before the driver: it lists those alone that a container was given
    if program := shutil.which("nvidia-smi"):
        try:
            answer = subprocess.run(
                [program, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RequestError(
                f"--nproc-per-node: {program} -L does not answer ({type(error).__name__}); use a number"
            ) from error
        if answer.returncode == 0:
            return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    return gpus_of_the_driver()


def _named_devices(visible: str) -> int:
    """Counts the devices in CUDA_VISIBLE_DEVICES; as for CUDA, none count after an invalid one."""
    count = 0
    for name in visible.split(","):
        if not name.strip() or name.strip().startswith("-"):
            break
        count += 1
    return count
