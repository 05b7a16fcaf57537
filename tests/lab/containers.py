"""podman with storage, networks and processes of its own, which end with `Containers.close`.

Images are pulled and built with this machine's network, containers run in a network namespace without a way out. Knows
nothing of what the images hold.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab import namespaces
from tests.lab.namespaces import LabError
from tests.lab.wait import HANG_S, patiently

SPACE = Path(__file__).with_name("containers.sh")
_PROGRAMS = ("podman", "crun", "conmon", "iptables", "bash", "stat")
_NETWORK_PROGRAMS = ("netavark", "aardvark-dns")  # podman's own, outside PATH
_NETWORK_PATH = "/usr/lib/podman:/usr/libexec/podman:/usr/local/libexec/podman"

# No limit above this process's own is asked for, which needs a capability that a container's root lacks. Health checks
# need systemd, and an AppArmor profile one that podman knows to load; neither is tested here.
_CONTAINERS = """
[containers]
apparmor_profile = "unconfined"
cgroups = "disabled"
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
log_driver = "k8s-file"
pids_limit = 0
[network]
network_backend = "netavark"
network_config_dir = "{directory}/networks"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
runtime = "crun"
tmp_dir = "{directory}/state"
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{directory}/storage"
runroot = "{directory}/mounts"
"""
_REGISTRIES = """
unqualified-search-registries = ["docker.io"]
"""


def unavailable(directory: Path) -> str | None:
    """Why there can be no containers with storage in this directory, or None."""
    if reason := namespaces.unavailable():
        return reason
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    missing += [name for name in _NETWORK_PROGRAMS if shutil.which(name, path=_NETWORK_PATH) is None]
    if missing:
        return f"containers need {', '.join(missing)}; install Debian's podman, crun, netavark, aardvark-dns, iptables"
    on = subprocess.run(["stat", "-f", "-c", "%T", directory], capture_output=True, text=True, check=True)
    if on.stdout.strip() == "overlayfs":
        return f"{directory} is on an overlay, which cannot hold the layers of images"
    return None


class Containers:
    """`podman` runs its commands. `close` ends every container and removes everything of them."""

    def __init__(self, directory: Path) -> None:
        """directory: empty; removed by close()."""
        self._directory = directory
        self._started: list[subprocess.Popen[bytes]] = []
        self._env = dict(os.environ)
        for name, text in (
            ("CONTAINERS_CONF", _CONTAINERS),
            ("CONTAINERS_STORAGE_CONF", _STORAGE),
            ("CONTAINERS_REGISTRIES_CONF", _REGISTRIES),
        ):
            file = directory / name.lower()
            file.write_text(text.format(directory=directory))
            self._env[name] = str(file)
        # else layers that are being written go to /var/tmp
        self._env["TMPDIR"] = str(directory / "temporary")
        for name in ("temporary", "networks", "empty"):
            (directory / name).mkdir()
        new = ("--mount", "--mount-proc", "--pid", "--fork", "--kill-child", "--net")
        self._space = subprocess.Popen(
            ["unshare", *new, "bash", SPACE, directory / "empty"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._space.stdout is not None
        if self._space.stdout.readline() != b"ready\n":  # or its end
            self.close()
            raise LabError(f"{SPACE.name} exited with {self._space.returncode}")

    def podman(
        self,
        *words: str | Path,
        limit_s: float = HANG_S,
        outside: bool = False,
        env: Mapping[str, str] = {},
    ) -> str:
        """Standard output of podman with these words. Raises LabError if it does not exit with 0 in time."""
        done = self.run(["podman", *words], limit_s=limit_s, outside=outside, env=env)
        if done.returncode != 0:
            shown = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            raise LabError(f"podman {' '.join(map(str, words))} exited with {done.returncode}\n{shown}")
        return done.stdout

    def run(
        self,
        words: Sequence[str | Path],
        *,
        limit_s: float = HANG_S,
        outside: bool = False,
        env: Mapping[str, str] = {},
    ) -> subprocess.CompletedProcess[str]:
        """A command that ended. outside: with this machine's network instead of the containers'.

        Raises LabError if it has not ended in time; its processes end with the space.
        """
        line = self._inside(words, outside)
        try:
            return subprocess.run(
                line,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=limit_s,
                env=self._env | dict(env),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise LabError(f"not within {limit_s:g} s: {' '.join(map(str, words))}") from error

    def start(self, words: Sequence[str | Path], output: Path, env: Mapping[str, str] = {}) -> None:
        """Start a command that ends with the space at the latest. output: file of its stdout and stderr."""
        with output.open("ab") as stream:
            self._started.append(
                subprocess.Popen(
                    self._inside(words, outside=False),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=self._env | dict(env),
                    start_new_session=True,
                )
            )

    def logs(self, container: str) -> str:
        """What the container wrote to its standard output and error; "" if there is no such container."""
        done = self.run(["podman", "logs", container])
        return done.stdout + done.stderr if done.returncode == 0 else ""

    def exit_code(self, container: str) -> int | None:
        """None while it runs."""
        (found,) = json.loads(self.podman("inspect", "--type", "container", container))
        return None if found["State"]["Running"] else found["State"]["ExitCode"]

    def close(self) -> None:
        """End all processes with the space's process 1, and with it its mounts and networks; remove the directory."""
        assert self._space.stdin is not None and self._space.stdout is not None
        self._space.stdin.close()
        try:
            patiently(self._space.wait, HANG_S)
        finally:
            self._space.kill()  # no-op after the wait
        for process in self._started:
            patiently(process.wait, HANG_S)
        self._space.stdout.close()
        shutil.rmtree(self._directory)

    def _inside(self, words: Sequence[str | Path], outside: bool) -> list[str | Path]:
        own = f"/proc/{self._space.pid}/ns"
        into = [f"--mount={own}/mnt", f"--pid={own}/pid_for_children", f"--wd={Path.cwd()}"]
        return ["nsenter", *into, *([] if outside else [f"--net={own}/net"]), "--", *words]
