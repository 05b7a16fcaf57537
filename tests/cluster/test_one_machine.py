"""The commands of docs/cluster.md for one machine, in their order, on a lab host: from no cluster to an ended job."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

from tests.docs.page_blocks import ROOT
from tests.docs.printed import printed_commands
from tests.lab.fixtures import MakeLab
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

DEADLINE_S = 60.0
SHORT = ["--epochs", "1", "--characters", "10000"]  # of char_lm.py, the job of the page
MODULES = {"bagua-agent": "bagua_agent.service", "bagua-launch": "bagua_launch"}


def commands_of_page(home: Path, config: Path) -> list[list[str]]:
    """The words of each command behind those that install Bagua. home, config: for ~/.bagua and agent.toml."""
    given = {"~/.bagua": str(home), "agent.toml": str(config)}
    venv, activate, pip, *others = printed_commands("docs/cluster.md", "example-config", given)
    assert (venv[0], activate[0], pip[0]) == ("python3", ".", "pip")
    assert [words[0] for words in others] == ["etcd", "bagua-agent", "bagua-agent", "bagua-launch"]
    return [[word for word in words if word != "&"] for words in others]


def test_a_job_is_submitted_to_a_cluster_of_one_machine(make_lab: MakeLab, tmp_path: Path) -> None:
    host = make_lab(1).hosts[0]
    printed = tmp_path / "agent.toml"
    etcd, config, serve, submit = commands_of_page(tmp_path, printed)
    programs = Path(sys.executable).parent
    env = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_"))}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "OMP_NUM_THREADS": "1"}

    def program(words: list[str], output: Path) -> LabProcess:
        own = [sys.executable, "-m", MODULES[words[0]], *words[1:]]
        return host.run_agent(own, env, output, cwd=ROOT)

    store = host.run([programs / etcd[0], *etcd[1:]], env=env, output=tmp_path / "etcd.log")

    assert config[-2:] == [">", str(printed)]
    assert program(config[:-2], printed).wait(DEADLINE_S) == 0
    # lab hosts need root, of which the other stream speaks
    text = printed.read_text().split("bagua-agent: jobs do not run as root")[0]
    home = re.search(r'state = "(.*)/\.bagua/state"', text)
    assert home, text
    printed.write_text(
        text.replace(f"{home[1]}/.bagua", str(tmp_path)).replace(
            "users =", 'environment = ["PYTHONPATH"]\nusers ='
        )
    )

    said = tmp_path / "daemon.log"
    daemon = program(serve, said)
    shown = tmp_path / "submit.log"
    submitted = program([*submit[:2], "--user", "root", *submit[2:], *SHORT], shown)
    code = submitted.wait(2 * DEADLINE_S)
    assert code == 0, shown.read_text() + said.read_text()
    assert "succeeded" in shown.read_text()

    daemon.send(signal.SIGTERM)
    assert daemon.wait(DEADLINE_S) == 0, said.read_text()
    store.send(signal.SIGTERM)
    store.wait(DEADLINE_S)
    eventually(lambda: not host.pids(), DEADLINE_S, "no process is left", 0.05)
