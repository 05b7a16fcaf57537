"""Scripts written for torchrun run unchanged, and are started again when the membership changes."""

from __future__ import annotations

import ipaddress
import json
import re
import signal
import time
from pathlib import Path

import pytest

from bagua_agent.etcd.keys import JobKeys
from bagua_contract.records import GenerationKind
from tests.docs.printed import printed
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import ROOT, START_S, Job, Node
from tests.faults.test_frozen_leader import written_under
from tests.lab.network import Host
from tests.lab.wait import HANG_S, eventually

DDP = "examples/stock_ddp.py"
FSDP2 = "examples/stock_fsdp2.py"
ONE_WORKER = ("--nproc-per-node", "1")  # on each node, behind what a page prints: processors are few

# What a script of torchrun's world can look at: it writes its environment at each start, and runs until told to stop.
LOOKS = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist

out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.ones(1)
dist.all_reduce(total)
names = [n for n in os.environ if n.startswith(("TORCH", "MASTER", "ROLE", "GROUP")) or "RANK" in n or "WORLD" in n]
start = {n: os.environ[n] for n in names} | {"total": total.item(), "pid": os.getpid(), "time": time.time()}
path = out / f"start-{time.time_ns()}-{rank}.json"
path.with_suffix(".half").write_text(json.dumps(start))
path.with_suffix(".half").rename(path)
while True:
    time.sleep(0.02)
    stop = torch.tensor([float((out / "stop").exists())])
    dist.all_reduce(stop)
    if stop.item() > 0:
        break
    if (out / f"fail-{rank}").exists():
        (out / f"fail-{rank}").unlink()
        raise ValueError("told to fail")
dist.destroy_process_group()
"""


class Looking:
    """A job of LOOKS and what its starts wrote."""

    def __init__(self, directory: Path, make: MakeJob, **keywords: object) -> None:
        self.out = directory / "looks"
        self.out.mkdir()
        script = directory / "looks.py"
        script.write_text(LOOKS)
        self.job: Job = make(program=[str(script), str(self.out)], **keywords)

    def starts(self) -> list[dict[str, str]]:
        return [json.loads(p.read_text()) for p in sorted(self.out.glob("start-*.json"))]

    def await_starts(self, world: int, since: int = 0, deadline_s: float = 30.0) -> list[dict[str, str]]:
        """The starts of one generation of `world` workers, the first whose starts are all past number `since`."""

        def whole() -> list[dict[str, str]] | None:
            by_port: dict[str, list[dict[str, str]]] = {}
            for start in self.starts()[since:]:
                if start["WORLD_SIZE"] == str(world):
                    by_port.setdefault(start["MASTER_PORT"], []).append(start)
            return next((s for s in by_port.values() if len(s) == world), None)

        return eventually(whole, deadline_s, lambda: f"{world} starts after {since} of {self.starts()}", 0.02)

    def stop(self) -> None:
        (self.out / "stop").touch()


def epochs(node: Node) -> list[tuple[int, int]]:
    """(epoch, processes) of each line that rank 0 printed there."""
    return [
        (int(a), int(b)) for a, b in re.findall(r"epoch (\d+) loss [\d.]+ with (\d+) processes", node.log)
    ]


def await_epochs(node: Node, processes: int, count: int = 2, deadline_s: float = START_S) -> None:
    def there() -> bool:
        return sum(p == processes for _, p in epochs(node)) >= count

    eventually(there, deadline_s, lambda: f"{count} epochs with {processes} processes\n{node.log}", 0.02)


@pytest.mark.parametrize("leads", [False, True], ids=["another host", "the leader's host"])
def test_a_stock_ddp_script_grows_and_outlives_a_lost_host(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path, leads: bool
) -> None:
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[2])
    *options, script = printed("README.md", "examples/stock_ddp.py", {DDP: str(ROOT / DDP)})
    program = [script, "--epochs", "1000", "--pause", "0.05", "--checkpoint", str(tmp_path / "spiral.pt")]
    # the lease outlasts every deadline here, so nothing but a confirmed death can end the wait
    options += [*ONE_WORKER, "--rdzv-conf", "lease_ttl=60"]
    one = job(endpoints=cluster.endpoints, program=program, options=options)
    first = one.start(lab.hosts[0])
    await_epochs(first, 1)
    second = one.start(lab.hosts[1])
    await_epochs(first, 2)
    assert first.says("this node leads")
    lost, stays = (first, second) if leads else (second, first)
    before = len(epochs(first))
    done_before = epochs(first)[before - 1][0]
    alone = sum(p == 1 for _, p in epochs(stays))
    lost_at_s = time.monotonic()
    assert lost.host is not None
    lost.host.kill_all()
    assert lost.process.wait(5) != 0, "the host is gone"
    await_epochs(stays, 1, count=alone + 1)
    one.measured("restart mode, host killed -> next epoch", time.monotonic() - lost_at_s, 6.0)
    assert done_before <= epochs(stays)[-1][0], "it went on from its checkpoint"
    assert stays.says("lost")
    assert stays.says("this node leads")
    written_under(one, cluster)
    stays.send(signal.SIGTERM)
    assert stays.process.wait(15) == 128 + signal.SIGTERM
    one.check_nothing_left()


SAYS_NOTHING = """
import os, sys, time
from pathlib import Path

(Path(sys.argv[1]) / f"{os.environ['WORLD_SIZE']}-{os.environ['RANK']}-{time.time_ns()}").touch()
time.sleep(600)
"""


def has_touched(watcher: Host, other: Host) -> bool:
    """Whether connections that `watcher` has closed lead to `other`; no worker of the job makes any."""
    table = watcher.inside(lambda: Path("/proc/thread-self/net/tcp").read_text())
    address = ipaddress.ip_address(other.address).packed[::-1].hex().upper()
    rows = (line.split() for line in table.splitlines()[1:])
    return any(remote.startswith(f"{address}:") and state == "06" for _, _, remote, state, *_ in rows)


@pytest.mark.parametrize("how", ["killed", "vanished"])
@pytest.mark.parametrize("leads", [False, True], ids=["another host", "the leader's host"])
def test_a_lost_host_is_found_while_no_worker_says_anything(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path, leads: bool, how: str
) -> None:
    """As workers that wait in torch's Gloo for a lost peer without end."""
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[2])
    out = tmp_path / "starts"
    out.mkdir()
    script = tmp_path / "says_nothing.py"
    script.write_text(SAYS_NOTHING)
    # the lease outlasts the test
    options = ["--rdzv-conf", "lease_ttl=60"]
    one = job(endpoints=cluster.endpoints, nodes="1:2", program=[str(script), str(out)], options=options)
    first = one.start(lab.hosts[0])
    first.await_line("this node leads")
    second = one.start(lab.hosts[1])

    def started(world: int) -> bool:
        return len(list(out.glob(f"{world}-*"))) >= world

    eventually(lambda: started(2), START_S, lambda: f"{first.log}\n{second.log}", 0.02)
    for alone in out.glob("1-*"):
        alone.unlink()
    lost, stays = (first, second) if leads else (second, first)
    assert lost.host is not None and stays.host is not None
    watcher, other = stays.host, lost.host
    eventually(lambda: has_touched(watcher, other), 10, lambda: f"a touch\n{stays.log}", 0.02)
    lost_at_s = time.monotonic()
    if how == "killed":
        lost.host.kill_all()
    else:
        lost.host.power_off()
    eventually(lambda: started(1), 30, lambda: stays.log, 0.02)
    one.measured(f"restart mode, silent workers, host {how} -> next start", time.monotonic() - lost_at_s, 8.0)
    assert stays.says("lost") and stays.says("this node leads")
    written_under(one, cluster)
    stays.send(signal.SIGTERM)
    assert stays.process.wait(15) == 128 + signal.SIGTERM


@pytest.mark.long
def test_a_node_whose_loop_waits_is_lost_while_no_worker_says_anything(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path
) -> None:
    """Its kernel accepts touches, and its other threads would renew its lease without end."""
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[2])
    out = tmp_path / "starts"
    out.mkdir()
    script = tmp_path / "says_nothing.py"
    script.write_text(SAYS_NOTHING)
    one = job(endpoints=cluster.endpoints, nodes="1:2", program=[str(script), str(out)])
    first = one.start(lab.hosts[0])
    first.await_line("this node leads")
    second = one.start(lab.hosts[1], agent_failpoints=f"worker-end.before=hold:{tmp_path}")

    def await_starts(world: int) -> None:
        def started() -> bool:
            return len(list(out.glob(f"{world}-*"))) >= world

        eventually(started, HANG_S, lambda: f"{first.log}\n{second.log}", 0.02)

    await_starts(2)
    for start in out.iterdir():
        start.unlink()
    (tmp_path / "worker-end.before").touch()
    second.workers[0].kill()
    await_starts(1)
    assert second.says("this agent's loop has waited") and first.says("lost")
    (held,) = tmp_path.glob("worker-end.before.*")
    held.unlink()
    await_starts(2)
    for node in (first, second):
        node.send(signal.SIGTERM)
    assert all(node.process.wait(HANG_S) == 128 + signal.SIGTERM for node in (first, second))


# The example, whose steps wait for the test.
SLOWLY = """
import runpy, sys, time
from pathlib import Path
import torch

hurry, script = Path(sys.argv.pop(1)), sys.argv.pop(1)
real = torch.optim.AdamW.step

def step(self, *arguments, **keywords):
    if not hurry.exists():
        time.sleep(0.4)
    return real(self, *arguments, **keywords)

torch.optim.AdamW.step = step
runpy.run_path(script, run_name="__main__")
"""


def test_a_stock_fsdp2_script_goes_on_with_another_world_size(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(2)
    directory = tmp_path / "reverser"
    slowly, hurry = tmp_path / "slowly.py", tmp_path / "hurry"
    slowly.write_text(SLOWLY)
    *options, script = printed(
        "docs/torchrun-scripts.md", "examples/stock_fsdp2.py", {FSDP2: str(ROOT / FSDP2)}
    )
    program = [str(slowly), str(hurry), script, "--checkpoint-dir", str(directory)]
    program += ["--steps", "40", "--every", "4", "--batch-size", "4"]
    options += ONE_WORKER
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, program=program, options=options)
    first = one.start(lab.hosts[0])
    first.await_line("loss", "with 1 processes")  # a checkpoint is written
    one.start(lab.hosts[1])
    first.await_line("from step", "with 2 processes")
    assert not first.says("from step 0 with 2 processes"), "it went on from its checkpoint"
    hurry.touch()
    one.finish()
    assert first.says("step 40 loss", "with 2 processes")
    one.check_nothing_left()


def test_every_generation_has_a_store_and_variables_of_its_own(job: MakeJob, tmp_path: Path) -> None:
    look = Looking(tmp_path, job, nodes="1", options=["--max-restarts", "2", "--role", "trainer"])
    node = look.job.start(slots=2)
    first = look.await_starts(2)
    (look.out / "fail-1").touch()
    second = look.await_starts(2, since=2)
    look.stop()
    look.job.finish()
    assert {s["MASTER_PORT"] for s in first} != {s["MASTER_PORT"] for s in second}
    for starts, restarts in ((first, "0"), (second, "1")):
        assert sorted(s["RANK"] for s in starts) == ["0", "1"]
        assert {s["total"] for s in starts} == {2.0}
        assert {s["TORCHELASTIC_RESTART_COUNT"] for s in starts} == {restarts}
        for start in starts:
            assert start["LOCAL_RANK"] == start["ROLE_RANK"] == start["RANK"]
            assert start["WORLD_SIZE"] == start["LOCAL_WORLD_SIZE"] == start["ROLE_WORLD_SIZE"] == "2"
            assert (start["GROUP_RANK"], start["GROUP_WORLD_SIZE"], start["ROLE_NAME"]) == (
                "0",
                "1",
                "trainer",
            )
            assert start["TORCHELASTIC_USE_AGENT_STORE"] == "True"
            assert start["TORCHELASTIC_MAX_RESTARTS"] == "2"
            assert start["TORCHELASTIC_RUN_ID"] == look.job.job_id
    assert node.says("ValueError: told to fail")
    look.job.check_nothing_left()


def test_a_killed_worker_costs_nothing_of_the_budget(job: MakeJob, tmp_path: Path) -> None:
    look = Looking(tmp_path, job, nodes="1")
    node = look.job.start(slots=2)
    first = look.await_starts(2)
    killed_at_s = time.monotonic()
    next(w for w in node.workers if w.slot == 1).kill()
    second = look.await_starts(2, since=2)
    look.job.measured("restart mode, worker killed -> all started", time.monotonic() - killed_at_s, 4.0)
    assert {s["pid"] for s in first}.isdisjoint({s["pid"] for s in second})
    look.stop()
    look.job.finish()
    assert node.says("SIGKILL")


def test_a_failing_script_ends_the_job_with_its_code_and_cause(job: MakeJob, tmp_path: Path) -> None:
    look = Looking(tmp_path, job, nodes="1")
    node = look.job.start(slots=2)
    look.await_starts(2)
    (look.out / "fail-0").touch()
    assert node.process.wait(20) == 1
    assert node.says("ValueError: told to fail")
    assert not node.says("generation 2")
    look.job.check_nothing_left()


def test_no_files_are_named_of_a_worker_that_left_none(job: MakeJob, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text("import sys\nsys.exit(3)\n")
    node = job(nodes="1", program=[str(script)]).start(slots=1)
    assert node.process.wait(30) == 3
    assert node.says("first failure:", "slot 0, global rank 0, exit code 3")
    assert not node.says("files in"), "the agent removes its empty directories"


@pytest.mark.parametrize("holds_rank_0", [True, False], ids=["rank 0 leaves", "another leaves"])
def test_a_node_that_leaves_ends_well_and_the_others_go_on(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path, holds_rank_0: bool
) -> None:
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[0])
    look = Looking(tmp_path, job, endpoints=cluster.endpoints, nodes="1:3")
    nodes = {host.address: look.job.start(host) for host in lab.hosts}
    rank_0_at = look.await_starts(3)[0]["MASTER_ADDR"]
    leaver = nodes[rank_0_at] if holds_rank_0 else next(n for a, n in nodes.items() if a != rank_0_at)
    stays = [node for node in nodes.values() if node is not leaver]
    records, starts = len(look.job.generations(cluster)), len(look.starts())
    asked_at_s = time.monotonic()
    leaver.send(signal.SIGTERM)
    assert leaver.process.wait(15) == 0, leaver.log
    second = look.await_starts(2, since=starts)
    look.job.measured("restart mode, node leaves -> all started", time.monotonic() - asked_at_s, 6.0)
    assert leaver.says("leaving") and leaver.says("left; the job goes on without this node")
    assert {s["total"] for s in second} == {2.0}
    assert {s["TORCHELASTIC_RESTART_COUNT"] for s in second} == {"0"}, "the budget is not touched"
    [new] = look.job.generations(cluster)[records:]
    assert (new.kind, new.world_size, new.script_failures) == (GenerationKind.RESTART, 2, 0)
    assert new.reason.endswith("leaves") and all(node.says(new.reason) for node in stays)
    now_at = {s["MASTER_ADDR"] for s in second}
    if holds_rank_0:
        assert now_at < nodes.keys() - {rank_0_at}, "the workers meet on a node that stays"
    else:
        assert now_at == {rank_0_at}, "rank 0 stays where the script keeps its files"
    look.stop()
    look.job.finish([0, 0, 0])
    assert len(look.job.generations(cluster)) == records + 1
    assert all(node.says("succeeded: every worker ended with 0") for node in stays)
    look.job.check_nothing_left()


# One rank alone has something left to do after the training, until the test lets it end.
SAVES = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist

out, saver = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
(out / f"trained-{time.time_ns()}").touch()
while os.environ["RANK"] == saver and not (out / "saved").exists():
    time.sleep(0.02)
"""


@pytest.mark.parametrize("how", ["leaves", "is lost", "is lost and led"])
def test_a_node_whose_workers_have_ended_is_needed_no_more(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path, how: str
) -> None:
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[2])
    script, out = tmp_path / "saves.py", tmp_path / "trained"
    script.write_text(SAVES)
    out.mkdir()
    saver = 1 if how == "is lost and led" else 0
    one = job(endpoints=cluster.endpoints, nodes="2", program=[str(script), str(out), str(saver)])
    nodes = [one.start(lab.hosts[0])]
    nodes[0].await_line("this node leads")  # it came first, so it gets rank 0
    nodes.append(one.start(lab.hosts[1]))
    saves, done = nodes[saver], nodes[1 - saver]
    keys = JobKeys(one.job_id)

    def has_finished() -> bool:
        return len(cluster.standing(keys.finished_workers)) == 1

    eventually(has_finished, START_S, lambda: f"{nodes[0].log}\n{nodes[1].log}", 0.02)
    if how == "leaves":
        done.send(signal.SIGTERM)
        assert done.process.wait(15) == 0, done.log
    else:
        assert done.host is not None
        done.host.kill_all()
    eventually(lambda: len(cluster.standing(keys.agents)) == 1, 30, lambda: saves.log, 0.02)
    saves.await_line("this node leads")
    (out / "saved").touch()
    assert saves.process.wait(30) == 0, saves.log
    assert saves.says("succeeded: every worker ended with 0")
    assert len(list(out.glob("trained-*"))) == 2, "no worker was started again"
    assert len(one.generations(cluster)) == 1
    one.check_nothing_left()


def test_without_a_warm_parent(job: MakeJob, tmp_path: Path) -> None:
    look = Looking(tmp_path, job, nodes="1", options=["--start-method", "spawn", "--max-restarts", "1"])
    look.job.start(slots=1)
    look.await_starts(1)
    (look.out / "fail-0").touch()
    look.await_starts(1, since=1)
    look.stop()
    look.job.finish()
    unless = "looks.py does not call bagua_core.init_process_group; unless a module that it imports does,"
    assert look.job.nodes[0].says(f"{unless} --ledger has no effect")
    look.job.check_nothing_left()


def test_a_session_opened_by_a_module_of_the_script_makes_the_job_live(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "trains.py").write_text(
        "import torch, bagua_core as bagua\n"
        "def main():\n"
        "    bagua.init_process_group()\n"
        "    net = torch.nn.Linear(1, 1)\n"
        "    optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "    model = bagua.DistributedDataParallel(net, optimizers=[optimizer])\n"
        "    while bagua.next_step() < 20:\n"
        "        optimizer.zero_grad(); model(torch.ones(1, 1)).sum().backward(); optimizer.step()\n"
        "    print('world', bagua.get_world_size(), 'generation', bagua.generation() > 0)\n"
    )
    script = tmp_path / "plain.py"
    script.write_text("import trains\ntrains.main()\n")
    one = job(nodes="1", program=[str(script)])
    node = one.start(slots=2)
    one.finish()
    assert node.says("world 2 generation True", times=2)


def test_a_script_of_both_modes_is_told_so(job: MakeJob, tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text(
        "import torch.distributed as dist\nimport bagua_core as bagua\n"
        "dist.init_process_group('gloo')\nopens = bagua.init_process_group\nopens()\n"
    )
    one = job(nodes="1", program=[str(script)])
    node = one.start(slots=1)
    assert node.process.wait(30) == 1
    assert node.says("MixedModesError", "call only one of the two")
