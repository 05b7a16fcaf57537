"""A daemon starts although the name of its first etcd endpoint is not known, or not yet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.lab.free_port import free_port
from tests.lab.wait import eventually

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0
CONFIG = """
insecure = true
[etcd]
endpoints = ["no-such-host.invalid:2379", "{endpoint}"]
[node]
name = "n0"
slots = 1
[jobs]
users = ["root"]
[listen]
port = {port}
[directories]
state = "{folder}/state"
log = "{folder}/log"
"""


def test_a_daemon_passes_over_an_endpoint_without_an_address(
    plain_etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    config, log = tmp_path / "agent.toml", tmp_path / "daemon.log"
    config.write_text(CONFIG.format(endpoint=plain_etcd.endpoint, port=free_port(), folder=tmp_path))
    words = [sys.executable, "-m", "bagua_agent.service", "serve", "--plain-units", "--config", str(config)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    with log.open("wb") as output:
        daemon = subprocess.Popen(words, env=env, stdout=output, stderr=output)
    try:
        eventually(
            lambda: "node n0 has 1 slots" in log.read_text() or daemon.poll() is not None,
            DEADLINE_S,
            lambda: f"the daemon starts\n{log.read_text()}",
        )
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        daemon.kill()
        daemon.wait(DEADLINE_S)
