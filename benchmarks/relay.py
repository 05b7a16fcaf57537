"""Links with a delay, for the lab: netem would do it, but not every kernel has it.

Takes the hosts' ports off the switch's bridge and lets a process forward between them (relay_forwarder.cc), which
holds every frame for the delay; so a round trip takes twice as long. Rates stay the lab's own (`Lab.shape`).
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.net_driver import build
from tests.lab import namespaces
from tests.lab.namespaces import LabError
from tests.lab.network import Lab
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

_DEADLINE_S = 20.0
LONGEST_DELAY_S = 1.0


@dataclass(frozen=True, slots=True)
class RelayAccount:
    """What a relay did. late: frames sent more than 1 ms after they were due; latest_s: the worst of them."""

    forwarded: int
    dropped: int
    late: int
    latest_s: float
    cpu_s: float
    priority: str


class Relay:
    """Runs until `stop`. Needs a C++ compiler. Raises LabError if it does not come up, or ended by itself."""

    def __init__(self, lab: Lab, delay_s: float) -> None:
        if not 0 < delay_s <= LONGEST_DELAY_S:
            raise LabError(f"a delay of {delay_s} s; more than 0 and up to {LONGEST_DELAY_S:g}")
        self._lab = lab
        self._ports = [host.port_on_switch for host in lab.hosts]
        self._output = lab.directory / "relay.log"
        self._output.unlink(missing_ok=True)
        self._bridge(False)
        nsenter = shutil.which("nsenter") or "nsenter"
        # in the switch's namespace: whatever happens here, it ends with the lab
        self._process = LabProcess(
            [nsenter, f"--net={namespaces.NETNS_DIR / lab.switch}", "--"],
            [str(build.relay()), repr(delay_s), *self._ports],
            env=None,
            output=self._output,
            host_name="switch",
        )
        try:
            eventually(self._is_ready, _DEADLINE_S, "a relay that forwards")
        except BaseException:
            self._process.kill()
            self._bridge(True)
            raise

    def stop(self) -> RelayAccount:
        """The links have no delay any more. Frames under way are lost."""
        self._process.send(signal.SIGTERM)
        code = self._process.wait(_DEADLINE_S)
        self._bridge(True)
        if code != 0:
            raise LabError(f"the relay ended with {code}\n{self._process.tail()}")
        return RelayAccount(**json.loads(self._process.text().splitlines()[-1]))

    def _is_ready(self) -> bool:
        if not self._process.is_running:
            raise LabError(f"the relay ended\n{self._process.tail()}")
        return "ready" in self._process.text()

    def _bridge(self, on: bool) -> None:
        words = "master br0" if on else "nomaster"
        namespaces.ip_batch(self._lab.switch, [f"link set {port} {words}" for port in self._ports])


@contextmanager
def delayed(lab: Lab, delay_s: float) -> Iterator[list[RelayAccount]]:
    """Frames between hosts of `lab` take `delay_s` longer in here. The list gets the account at the end."""
    accounts: list[RelayAccount] = []
    relay = Relay(lab, delay_s)
    try:
        yield accounts
    finally:
        accounts.append(relay.stop())
