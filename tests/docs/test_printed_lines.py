"""What of a terminal's line counts when a page is compared with a job, and what differs from run to run."""

from __future__ import annotations

import pytest

from tests.docs.printed_lines import missing, normalised, parts

PREFIX = "bagua 10:12:51 h2 | "
FAILED = "bagua: step 9 in generation 3 did not happen: "
IN_FORCE = "generation 4 is in force from step 10: 2 workers on 2 nodes (-h4)"
LOST = "; lost global rank 2 on h4 (the agent refused the connection)"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"{PREFIX}etcd answers again", "bagua 23:00:01 vm-2 | etcd answers again"),
        (
            f"{PREFIX}{IN_FORCE}{LOST}; 0.11 s without steps: failed step 0.1 s, failover 0.013 s",
            f"{PREFIX}generation 14 is in force from step 7: 2 workers on 2 nodes (-h3)"
            "; lost global rank 0 on h3 (the agent answered neither the leader nor h2); 2 s without steps: failed step",
        ),
        (f"{PREFIX}{IN_FORCE}; drops h4", f"{PREFIX}{IN_FORCE}; drops h4; less than 0.01 s without steps"),
        (
            f"{FAILED}broadcast: Read error [10.77.69.4]:50913: Connection reset by peer.",
            f"{FAILED}allreduce: Connection closed by peer [127.0.0.1]:9.",
        ),
        (
            f"{FAILED}broadcast: Read error [10.77.69.4]:50913: Connection reset by peer.",
            f"{FAILED}generation 4: {LOST[2:]}",
        ),
        (
            "stacks of worker vm-44679f.1.0480a3 in /tmp/a/slot1-vm-44679f.1.0480a3/stacks-20261128T075226Z.txt",
            "stacks of worker h2-00000f.0.000000 in /tmp/b",
        ),
        ("lost global ranks 0, 1 on vm (killed by SIGKILL)", "lost global rank 0 on vm (killed by SIGKILL)"),
        (
            "job demo failed: rank 0 waits (train.py:14)",
            "job faults-1-job-0 failed: rank 1 waits (train.py:9)",
        ),
    ],
)
def test_what_differs_from_run_to_run_is_replaced(one: str, other: str) -> None:
    assert one != other and normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (IN_FORCE, IN_FORCE.replace("2 workers", "1 worker")),
        (IN_FORCE, IN_FORCE.replace("-h4", "+h4")),
        (IN_FORCE + LOST, f"{IN_FORCE}; drops h4"),
        ("lost global rank 2 on h4 (killed by SIGKILL)", "lost global rank 2 on h4 (the agent is gone)"),
        ("worker in slot 1 ended: killed by SIGKILL", "worker in slot 0 ended: killed by SIGKILL"),
        ("exit code 1, files in /tmp/a", "exit code 2, files in /tmp/a"),
        (f"{IN_FORCE}; 0.1 s without steps: failed step", f"{IN_FORCE}; 0.1 s without steps: lunch"),
        (f"{FAILED}allreduce: Connection closed by peer [::1]:9.", f"{FAILED}the script raised"),
        ("job demo failed: a", "job demo stopped: a"),
    ],
)
def test_what_a_reader_relies_on_stays(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def test_lines_are_missing_that_no_run_prints_or_that_come_too_early() -> None:
    printed = [f"{PREFIX}etcd does not answer", f"{PREFIX}etcd answers again"]
    assert missing(printed, "\n".join([*printed, "more"])) == []
    assert missing(printed, "\n".join(reversed(printed))) == printed[1:]
    assert missing([*printed, "bagua: another"], "\n".join(printed)) == ["bagua: another"]
    assert missing(printed[:1] * 2, printed[0]) == printed[:1], "twice on the page, once in the job"


def test_lines_of_agents_and_of_workers_have_no_common_order() -> None:
    agent, worker = f"{PREFIX}{IN_FORCE}", f"{FAILED}it ended"
    assert missing([agent, worker], f"{worker}\n{agent}\n") == []


def test_a_gap_divides_a_block() -> None:
    assert parts("a\nb\n...\nc\n") == [["a", "b"], ["c"]]
