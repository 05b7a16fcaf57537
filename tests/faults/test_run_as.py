"""Workers of a service's job run under another account: what they have of it, and what of the agent's they can't reach.

In a mount namespace in which that account may read this interpreter, wherever it lies.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.workers.process.account import find_account

ROOT = Path(__file__).resolve().parents[2]
WHO = "nobody"
LIMIT_S = 60.0

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change users")

# Our home as an overlay whose own directory may be passed through; gone with the namespace.
OPEN_HOME = """
set -e
if [ "$(stat -c %a "$2")" != 755 ]; then
  mount -t tmpfs none "$1"
  mkdir -m 755 "$1/upper" "$1/work"
  mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" "$2"
fi
shift 2
exec "$@"
"""

AGENT = """
import sys
from bagua_agent.job.run import run_job
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
script, log_dir, start_method = sys.argv[1:]
config = JobConfig("as-nobody", WorkerCommand(CommandKind.SCRIPT, script), slots=2, run_as="nobody",
                   log_dir=log_dir, redirects="3", start_method=start_method, max_restarts=0)
sys.exit(run_job(config))
"""

LOOK = """
import json, os, socket, sys
import bagua_core as bagua

def tried(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "done"

sock = os.environ["BAGUA_SESSION_SOCKET"]
found = {
    "uid": os.getresuid(), "gid": os.getresgid(), "groups": os.getgroups(), "home": os.environ["HOME"],
    "user": os.environ["USER"], "list": tried(lambda: os.listdir(os.path.dirname(sock))),
    "store": tried(lambda: os.listdir(os.path.join(os.path.dirname(sock), "store"))),
    "log": tried(lambda: open(os.path.join(os.path.dirname(os.environ["BAGUA_ERROR_FILE"]), "new"), "w")),
    "capabilities": [l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")],
}
print("FOUND", json.dumps(found), flush=True)
@@
"""
TRAIN = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = bagua.DistributedDataParallel(model, [optimizer])
data = torch.utils.data.TensorDataset(torch.randn(16, 2))
for (rows,) in bagua.ElasticDataLoader(data, global_batch_size=4):
    optimizer.zero_grad()
    ddp(rows).mean().backward()
    optimizer.step()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every account may pass through: pytest's own are their owner's alone."""
    with tempfile.TemporaryDirectory(prefix="bagua-run-as-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def run(place: Path, source: str, start_method: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    script = place / "script.py"
    script.write_text(source)
    (place / "mount").mkdir()
    line = ["unshare", "--mount", "sh", "-c", OPEN_HOME, "sh", str(place / "mount"), pwd.getpwuid(0).pw_dir]
    done = subprocess.run(
        [*line, sys.executable, "-c", AGENT, str(script), str(place / "logs"), start_method],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done, sorted((place / "logs").rglob("slot*"))


@pytest.mark.parametrize("start_method", ["warm", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_have_the_account_and_nothing_of_the_agent(place: Path, start_method: str) -> None:
    done, workers = run(place, LOOK.replace("@@", TRAIN), start_method)
    assert done.returncode == 0, done.stderr
    assert "fork_posix" not in done.stderr, "gRPC's fork handlers speak up where the agent forks"
    assert len(workers) == 2
    entry = pwd.getpwnam(WHO)
    for worker in workers:
        (line,) = [li for li in (worker / "stdout.log").read_text().splitlines() if li.startswith("FOUND ")]
        found = json.loads(line.removeprefix("FOUND "))
        assert found["uid"] == [entry.pw_uid] * 3 and found["gid"] == [entry.pw_gid] * 3
        assert found["groups"] in ([], [entry.pw_gid])
        assert (found["user"], found["home"]) == (WHO, entry.pw_dir)
        assert found["capabilities"] == ["0000000000000000"]
        assert found["list"] == found["store"] == found["log"] == "PermissionError"


def test_what_ended_a_worker_is_told_as_ever(place: Path) -> None:
    done, workers = run(place, LOOK.replace("@@", TRAIN + "raise LookupError('no such thing')\n"), "warm")
    assert done.returncode == 1
    assert "LookupError: no such thing" in done.stderr
    for worker in workers:
        assert (worker / "error.json").stat().st_uid in (pwd.getpwnam(WHO).pw_uid,)


def test_an_unknown_account_is_refused() -> None:
    with pytest.raises(UserError, match="user 'no-such-user' does not exist on this node; make it"):
        find_account("no-such-user")
    assert find_account(pwd.getpwuid(os.geteuid()).pw_name) is None
