"""A running job takes other settings of its steps at a boundary: no process starts again, and joiners have them."""

from __future__ import annotations

import json
import re

from bagua_contract.step_settings import AS_SCRIPTED, StepSettings
from bagua_launch.main import cli
from tests.docs.printed import printed_block, printed_commands
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import DEADLINE_S, Job
from tests.lab.network import Host
from tests.lab.wait import eventually

WIDTH = "1024"  # 21,508 parameters: one bucket as the script has it, and large enough to be compressed


def tune(one: Job, host: Host, *words: str) -> str:
    return one.command(host, "tune", *words)


def numbered(answer: str) -> str:
    """The answer without the job's name, and with one number for all generations."""
    return re.sub(r"^job '\S+': generation \d+", "generation N", answer)


def test_buckets_and_algorithm_of_a_running_job(job: MakeJob, make_lab: MakeLab) -> None:
    assert "tune" in cli.commands
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[0])
    options = ["--digest-every", "5"]  # and one that differs would end the job
    one = job(endpoints=cluster.endpoints, nodes="2:3", script=["--width", WIDTH], options=options)
    first, second = one.start(lab.hosts[0]), one.start(lab.hosts[1])
    one.await_world(2)
    processes = [first.workers, second.workers]

    tune(one, lab.hosts[2], "--bucket-size", "16KiB", "--algorithm", "bytegrad", "--hierarchical", "off")
    first.await_line("other settings of steps: algorithm bytegrad, buckets of 16 KiB, flat")
    first.await_line("generation 3 is in force from step")
    tuned = one.step
    assert [first.workers, second.workers] == processes, "no process was started again"
    assert not first.says("did not happen") and not second.says("did not happen"), "a change costs no step"

    one.start(lab.hosts[2])
    joined = one.await_world(3, after_step=tuned)
    second.kill_agent()
    alone = one.await_world(2, after_step=joined)
    assert first.missed_a_peer
    one.await_step(alone + 2)
    one.finish([0, -9, 0])
    one.check(finished=2)
    ends = one.ends()
    assert {(e["operation"], e["buckets"]) for e in ends} == {("CompressedSum", 2)}, "a joiner has them too"
    wanted = StepSettings(16 << 10, False, "bytegrad")
    records = one.generations(cluster)
    assert [r.settings for r in records] == [AS_SCRIPTED] * 2 + [wanted] * (len(records) - 2)
    assert len(records) >= 5, "the failover generation has them too"


def test_a_running_job_switches_to_qadam_and_back(job: MakeJob, make_lab: MakeLab) -> None:
    """Its optimizer is QAdam's from the start, and past the warm-up. All workers end equal (`check`), and the
    generation of a join and that of a loss have the algorithm too."""
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[0])
    script = ["--width", WIDTH, "--qadam-optimizer"]
    one = job(
        endpoints=cluster.endpoints, nodes="2:3", script=script, options=["--digest-every", "5"], epochs=6
    )
    first, second = one.start(lab.hosts[0]), one.start(lab.hosts[1])
    one.await_world(2)
    one.await_step(8)
    processes = [first.workers, second.workers]
    tune(one, lab.hosts[2], "--algorithm", "qadam")
    first.await_line("other settings of steps: algorithm qadam")
    first.await_line("generation 3 is in force from step")
    tuned = one.step
    assert [first.workers, second.workers] == processes, "no process was started again"
    assert not first.says("did not happen") and not second.says("did not happen"), "a change costs no step"

    third = one.start(lab.hosts[2])
    joined = one.await_world(3, after_step=tuned)
    second.kill_agent()
    alone = one.await_world(2, after_step=joined)
    tune(one, lab.hosts[2], "--algorithm", "gradient_allreduce")
    third.await_line("other settings of steps: algorithm gradient_allreduce")
    tune(one, lab.hosts[2], "--algorithm", "qadam")
    third.await_line("other settings of steps: algorithm qadam")
    one.await_step(alone + 4)
    one.finish([0, -9, 0])
    one.check(finished=2)
    assert {e["operation"] for e in one.ends()} == {"MomentumSum"}
    algorithms = [r.settings.algorithm for r in one.generations(cluster)]
    assert algorithms[:5] == ["", "", "qadam", "qadam", "qadam"], "a join and a loss have it"
    assert "gradient_allreduce" in algorithms[5:]


def test_pinned_settings_are_shown_and_forgotten(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(1)
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, script=["--width", WIDTH])
    node = one.start(lab.hosts[0], slots=2)
    one.await_step(2)
    given = {"etcd-1:2379": str(cluster.endpoints), "demo": one.job_id}
    block = printed_block("docs/autotuning.md", "--bucket-size 4MiB")
    answers = [numbered(line) for line in block.text.splitlines() if not line.startswith("$ ")]
    said = []
    for _, *words in printed_commands("docs/autotuning.md", "--bucket-size 4MiB", given):
        said.append(numbered(one.run(lab.hosts[0], *words).rstrip()))
        node.await_line("generation 3 is in force from step")
    assert said == answers

    def shown() -> dict[str, object]:
        return dict(json.loads(tune(one, lab.hosts[0], "--json")))

    assert shown()["newest"] == shown()["pinned"]
    tune(one, lab.hosts[0], "--forget")
    node.await_line("other settings of steps: as the script says")
    node.await_line("generation 4 is in force from step")
    eventually(lambda: shown()["generation"] == 4, DEADLINE_S, "generation 4 is the newest")
    one.finish()
    one.check(finished=2)
    assert {(e["operation"], e["buckets"]) for e in one.ends()} == {("Sum", 1)}
