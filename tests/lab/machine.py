"""A lab host that boots: systemd as process 1, with a disk of its own over this machine's, kept across reboots.

Owns booting, entering, and ending it. What is installed on it is the tests' affair; everything on it ends with the lab.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab import namespaces
from tests.lab.namespaces import LabError
from tests.lab.network import Host
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

ROOT = Path(__file__).resolve().parents[2]
BOOT = Path(__file__).with_name("boot_machine.sh")
SYSTEMD = Path("/usr/lib/systemd/systemd")
BOOT_DEADLINE_S = 60.0
COMMAND_TIMEOUT_S = 60.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def unavailable() -> str | None:
    """Why no machine can boot here, or None."""
    if reason := namespaces.unavailable():
        return reason
    if not SYSTEMD.exists():
        return f"no {SYSTEMD}; install Debian's systemd"
    return None


class Machine:
    """`boot` it; `close` (or its lab's end) ends it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._disk = host.lab.directory / f"{host.name}-disk"
        self._disk.mkdir()
        self._group = self._disk / "cgroup" / self.host.namespace
        self._keeper: subprocess.Popen[bytes] | None = None
        self._booted: LabProcess | None = None
        self._pid = 0

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def address(self) -> str:
        return self.host.address

    @property
    def is_up(self) -> bool:
        return self._pid != 0

    def boot(self) -> None:
        """Returns when systemd has started everything."""
        if self._keeper is None:
            self._keep_disk()
        assert self._keeper is not None
        hosts = namespaces.ETC_NETNS_DIR / self.host.namespace / "hosts"
        keep = dict.fromkeys(str(Path(p).resolve()) for p in (ROOT, sys.prefix, sys.base_prefix))
        log = self.host.lab.directory / f"{self.name}-boot.log"
        # a control group of its own first, or all machines of this one would share a tree of them
        join = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
        into = [
            "nsenter",
            "--target",
            str(self._keeper.pid),
            "--mount",
            "--",
            "sh",
            "-c",
            join,
            "sh",
            self._group,
            "unshare",
        ]
        own = ["--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--cgroup", "--"]
        self._booted = self.host.run(
            [*into, *own, "sh", BOOT, self._disk, self.name, hosts, *keep], output=log
        )
        eventually(self._is_up, BOOT_DEADLINE_S, lambda: f"{self} boots\n{log.read_text()}", 0.1)

    def _is_up(self) -> bool:
        assert self._booted is not None
        if not self._booted.is_running:
            raise LabError(f"{self} did not boot: {self._booted.tail()}")
        if not self._pid:
            child = Path(f"/proc/{self._booted.pid}/task/{self._booted.pid}/children").read_text().split()
            if not child or b"systemd" not in Path(f"/proc/{child[0]}/cmdline").read_bytes().split(b"\0")[0]:
                return False
            self._pid = int(child[0])
        return self.run(["systemctl", "is-system-running"], check=False).stdout.strip() in (
            "running",
            "degraded",
        )

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        text: str = "",
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on it, as root at home, to its end."""
        done = subprocess.run(
            self._entrance(argv, env), input=text, capture_output=True, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(
                f"{self}: {' '.join(map(str, argv))}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    def start(
        self, argv: Sequence[str | Path], output: Path | None = None, env: Mapping[str, str] | None = None
    ) -> LabProcess:
        """A command that goes on by itself, as a person's terminal would have it."""
        words = self._entrance(argv, env)
        process = LabProcess(
            words[: -len(argv)], [str(w) for w in argv], env=None, output=output, host_name=self.name
        )
        self.host.processes.append(process)
        return process

    def _entrance(self, argv: Sequence[str | Path], env: Mapping[str, str] | None) -> list[str]:
        if not self._pid:
            raise LabError(f"{self} is not up")
        nsenter = shutil.which("nsenter") or "nsenter"
        spaces = ["--target", str(self._pid), "--mount", "--net", "--pid", "--uts", "--ipc", "--cgroup"]
        home = pwd.getpwuid(0).pw_dir  # our own HOME may be a directory that it lacks, as one under /tmp
        clean = ["env", "-i", f"PATH={_PATH}", f"HOME={home}", "LANG=C.UTF-8"]
        given = [f"{name}={value}" for name, value in (env or {}).items()]
        return [nsenter, *spaces, f"--wdns={home}", "--", *clean, *given, *map(str, argv)]

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self.run(["sh", "-c", 'mkdir -p "$(dirname "$1")" && umask 077 && cat > "$1" && chmod "$2" "$1"',
                  "sh", path, f"{mode:o}"], text=text)  # fmt: skip

    def seen(self, path: str) -> Path:
        """Where a file of the machine is seen from here, without a process there; no link on its way is absolute."""
        if not self._pid:
            raise LabError(f"{self} is not up")
        return Path(f"/proc/{self._pid}/root{path}")

    def read(self, path: str) -> str:
        return self.seen(path).read_text()

    def journal(self, unit: str, form: str = "cat") -> str:
        """form: of `journalctl -o`."""
        return self.run(["journalctl", "--no-pager", "-o", form, "-u", unit], check=False).stdout

    def processes(self, control_group: str) -> list[int]:
        """Process ids, as the machine counts them, of a control group and those below it; "" is all of them."""
        script = 'cd /sys/fs/cgroup/"$1" 2>/dev/null && find . -name cgroup.procs -exec cat {} +'
        return [
            int(p) for p in self.run(["sh", "-c", script, "sh", control_group], check=False).stdout.split()
        ]

    def pull_the_plug(self) -> None:
        """Everything on it is gone at once; its peers hear nothing. `boot` brings it back, disk and all."""
        self.host.cut()
        self._end()

    def plug_in(self) -> None:
        self.host.heal()
        self.boot()

    def reboot(self) -> None:
        """In order: services are stopped first."""
        assert self._booted is not None
        os.kill(self._pid, signal.SIGRTMIN + 4)  # systemd: power off
        try:
            self._booted.wait(BOOT_DEADLINE_S)
        finally:
            self._end()
        self.boot()

    def _end(self) -> None:
        if self._booted is not None:
            pid, self._pid = self._pid, 0
            if pid and self._booted.is_running:
                # The kernel ends everything in its process namespace first, then tells the one that waits for it.
                os.kill(pid, signal.SIGKILL)
                self._booted.wait(10)
            elif self._booted.is_running:
                self._booted.kill()
            self._booted = None

    def close(self) -> None:
        self._end()
        if self._keeper is not None:
            line = ["nsenter", "--target", str(self._keeper.pid), "--mount", "--", "find", self._group]
            done = subprocess.run(
                [*line, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+"],
                capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
            )  # fmt: skip
            self._keeper.kill()
            self._keeper.wait(10)
            self._keeper = None
            if done.returncode != 0:
                raise LabError(f"{self}: its control group stays: {done.stderr.strip()}")

    def _keep_disk(self) -> None:
        """A process whose mount namespace holds the disk, so that it is nowhere else and survives a reboot."""
        script = """
mount --make-rprivate / && mount -t tmpfs -o mode=755 tmpfs "$1" && mkdir "$1/cgroup" &&
mount -t cgroup2 cgroup2 "$1/cgroup" && mkdir -p "$2" && echo up && exec sleep infinity"""
        self._keeper = subprocess.Popen(
            [*self.host._entrance(), "--", "unshare", "--mount", "sh", "-c", script, "sh", self._disk, self._group],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        with self._keeper.stdout as stdout:
            line = stdout.readline()
        if line != b"up\n":
            raise LabError(f"{self}: no disk: {line.decode().strip()}")

    def __repr__(self) -> str:
        return f"<machine {self.name} {self.address}>"
