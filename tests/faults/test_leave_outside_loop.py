"""A node is asked to leave while its script is outside the loop: the committed state is saved in its place."""

from __future__ import annotations

import ast
import functools
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.node.live_workers import MARGIN_S as WORKERS_END_S
from bagua_core.elastic.step.late_leave_plan import FIRST_WRITE_S, MARGIN_S
from tests.faults.conftest import MakeJob
from tests.faults.job import Job, Node
from tests.faults.saved_steps import newest_step
from tests.lab.wait import eventually

SCRIPT = Path(__file__).with_name("train_and_evaluate.py")
SAMPLES, EPOCHS = 80, 3  # 10 steps an epoch
# The least in which a worker waits for a boundary first
GRACE_S = WORKERS_END_S + MARGIN_S + FIRST_WRITE_S + 0.5
START_S = 90.0  # imports on a busy machine
SAVED = "saves the committed state from outside the loop"


class Evaluating:
    """A job whose script takes long somewhere, until it is hurried."""

    def __init__(
        self,
        job: MakeJob,
        out: Path,
        *script: str,
        grace_s: float = GRACE_S,
        write_s: float = FIRST_WRITE_S,
        **more: object,
    ) -> None:
        """write_s: how long a worker expects its first part of a checkpoint to take; it has that and two seconds."""
        self.grace_s = grace_s + write_s - FIRST_WRITE_S
        self.out = out
        out.mkdir()
        self.saved = out / "saved"
        options = ["--checkpoint-dir", str(self.saved), "--shutdown-timeout", f"{self.grace_s:g}"]
        words = ["--out", str(out), "--samples", str(SAMPLES), "--epochs", str(EPOCHS)]
        words += ["--write-s", str(write_s), *script]
        self.job: Job = job(
            program=[str(SCRIPT), *words], samples=SAMPLES, epochs=EPOCHS, options=options, **more
        )
        self.job.out = out

    def await_long(self, workers: int) -> None:
        eventually(
            lambda: len(list(self.out.glob("takes-long-*"))) == workers, START_S, "it takes long", 0.05
        )

    def leave(self, nodes: list[Node], code: int = 128 + signal.SIGTERM) -> None:
        for node in nodes:
            node.send(signal.SIGTERM)
        assert [node.process.wait(min(self.grace_s, 2 * GRACE_S) + 5.0) for node in nodes] == [code] * len(
            nodes
        )
        assert not any(node.says("Traceback") or node.says("did not happen") for node in nodes)

    @property
    def ends(self) -> list[str]:
        return sorted(path.read_text() for path in self.out.glob("ended-*"))

    def goes_on(self, step: int, nodes: int = 1, slots: int = 1, voided: int = 0) -> None:
        """A second start begins where the first one ended, and ends as an undisturbed run."""
        self.job.hurry()
        again = [self.job.start(slots=slots) for _ in range(nodes)]
        assert [node.process.wait(120) for node in again] == [0] * nodes
        assert any(node.says(f"goes on from the checkpoint of step {step}") for node in again)
        assert len(self.job.ledger.voided) == voided
        assert self.job.ledger.check(SAMPLES, EPOCHS) == []
        self.job.check_nothing_left()

    @property
    def values(self) -> set[str]:
        return {path.read_text() for path in self.out.glob("values-*")}


Undisturbed = Callable[[int], set[str]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The values at the end of a run by so many workers of which none was asked to leave."""

    @functools.cache
    def values(slots: int) -> set[str]:
        directory = tmp_path_factory.mktemp("undisturbed")
        run = Evaluating(lambda **keywords: Job(directory, **keywords), directory / "evaluating")  # type: ignore[arg-type]
        run.job.hurry()
        try:
            assert run.job.start(slots=slots).process.wait(120) == 0
        finally:
            run.job.end()
        assert len(run.values) == slots
        return run.values

    return values


@pytest.mark.parametrize("slowly", ["computes", "sleeps", "compiles"])
def test_the_only_worker_evaluates_in_the_loop(
    job: MakeJob, tmp_path: Path, undisturbed: Undisturbed, slowly: str
) -> None:
    # where two threads want the interpreter, a busy machine is slow to let the writing one have it
    run = Evaluating(
        job, tmp_path / "out", "--after-step", "7", "--slowly", slowly, write_s=2 * FIRST_WRITE_S
    )
    node = run.job.start()
    run.await_long(1)
    run.leave([node])
    assert node.says(SAVED) and node.says("the checkpoint of step 7 is written")
    assert run.ends == ["KeyboardInterrupt"] and newest_step(run.saved) == 7
    run.goes_on(7)
    assert run.values == undisturbed(1)


def test_the_only_worker_stands_in_a_step(job: MakeJob, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The step did not happen: its forward began, and nothing more is known of it."""
    run = Evaluating(job, tmp_path / "out", "--in-step", "7")
    node = run.job.start()
    run.await_long(1)
    run.leave([node])
    assert node.says(SAVED) and newest_step(run.saved) == 6
    run.goes_on(6)
    assert run.values == undisturbed(1)


@pytest.mark.parametrize(
    ("where", "step"), [(("--after-step", "7"), 7), (("--after-epochs", "1"), 10)], ids=["loop", "epochs"]
)
def test_one_of_two_nodes_evaluates_while_the_other_waits_in_the_next_step(
    job: MakeJob,
    etcd: EmbeddedEtcd,
    tmp_path: Path,
    undisturbed: Undisturbed,
    where: tuple[str, str],
    step: int,
) -> None:
    run = Evaluating(job, tmp_path / "out", *where, "--only-first", endpoints=etcd.endpoint, nodes="2")
    nodes = [run.job.start(), run.job.start()]
    run.await_long(1)
    run.leave(nodes)
    assert all(node.says(SAVED) for node in nodes) and newest_step(run.saved) == step
    # The one that evaluates is interrupted. The other may first be freed from its wait by the leave of that one, and
    # meets its own leave at the guard of the state.
    assert run.ends in (["KeyboardInterrupt"] * 2, ["KeyboardInterrupt", "LeaveInterrupt"])
    assert any(node.says(f"the checkpoint of step {step} is written") for node in nodes)
    # That one saves alone if it hears first that the other is lost: with its own running statistics, as any sole
    # survivor.
    alone = bool(list(run.saved.glob(f"*-step-{step:09d}-*/part-00000-of-00001.safetensors")))
    run.goes_on(step, nodes=2)
    if alone:
        assert trained_values(run.values) == trained_values(undisturbed(2))
    else:
        assert run.values == undisturbed(2)


def trained_values(values: set[str]) -> set[str]:
    """Without the running statistics of the model's normalization."""
    found = set()
    for text in values:
        sums, rates = ast.literal_eval(text)
        found.add(repr(([*sums[:4], *sums[6:]], rates)))
    return found


@pytest.mark.parametrize("algorithm", ["local_sgd", "decentralized"])
def test_workers_whose_replicas_differ_save_the_first_ones(
    job: MakeJob, tmp_path: Path, algorithm: str
) -> None:
    run = Evaluating(job, tmp_path / "out", "--after-step", "7", "--algorithm", algorithm)
    node = run.job.start(slots=2)
    run.await_long(2)
    run.leave([node])
    assert node.says(SAVED, times=2) and newest_step(run.saved) == 7
    run.goes_on(7, slots=2)
    assert len(run.values) == 2, "the buffers differ, as each worker has its own batches"


def test_a_worker_evaluates_within_a_round_and_another_waits_at_its_end(job: MakeJob, tmp_path: Path) -> None:
    """The round did not happen. Both save the model with which it began, whatever each has trained since."""
    run = Evaluating(job, tmp_path / "out", "--after-step", "2", "--algorithm", "rounds", "--only-first")
    node = run.job.start(slots=2)
    run.await_long(1)
    run.leave([node])
    assert node.says(SAVED, times=2) and newest_step(run.saved) == 1
    run.goes_on(1, slots=2)


def test_two_nodes_evaluate_between_two_epochs(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    script = ("--after-epochs", "1", "--slowly", "sleeps")
    run = Evaluating(job, tmp_path / "out", *script, endpoints=etcd.endpoint, nodes="2")
    nodes = [run.job.start(), run.job.start()]
    run.await_long(2)
    run.leave(nodes)
    assert all(node.says(SAVED) for node in nodes) and newest_step(run.saved) == 10
    run.goes_on(10, nodes=2)
    assert run.values == undisturbed(2)


def test_before_the_first_step_workers_leave_at_once(job: MakeJob, tmp_path: Path) -> None:
    run = Evaluating(job, tmp_path / "out", "--in-step", "1", grace_s=300.0)
    node = run.job.start(slots=2)
    run.await_long(2)
    run.leave([node])  # within far less than the grace period
    assert node.says("worker ends: the node leaves before the first step", times=2)
    assert node.says("stopped: every worker left before the first step")
    assert run.ends == ["KeyboardInterrupt"] * 2 and newest_step(run.saved) == 0


def test_a_script_that_ignores_the_interrupt_is_ended_after_its_state_is_saved(
    job: MakeJob, tmp_path: Path
) -> None:
    run = Evaluating(job, tmp_path / "out", "--after-step", "7", "--slowly", "sleeps", "--ignores")
    node = run.job.start()
    run.await_long(1)
    run.leave([node])
    assert node.says("the script did not end when it was interrupted") and run.ends == []
    assert node.says("the checkpoint of step 7 is written") and newest_step(run.saved) == 7
    run.job.check_nothing_left()


def test_half_an_optimizer_step_is_not_saved(job: MakeJob, tmp_path: Path, undisturbed: Undisturbed) -> None:
    run = Evaluating(job, tmp_path / "out", "--in-optimizer", "7", "--slowly", "sleeps")
    run.job.start(options=["--checkpoint-every", "4"])
    run.await_long(1)
    node = run.job.nodes[0]
    run.leave([node])
    assert node.says("is not written: an optimizer is changing the parameters")
    assert node.says("the job is not marked stopped", "an optimizer is changing the parameters")
    assert newest_step(run.saved) == 4
    run.goes_on(4, voided=2)
    assert run.values == undisturbed(1)


def test_a_grace_period_that_is_too_short_is_said_when_the_leave_is_asked(
    job: MakeJob, tmp_path: Path
) -> None:
    run = Evaluating(job, tmp_path / "out", "--after-step", "7", grace_s=0.1)
    node = run.job.start()
    run.await_long(1)
    run.leave([node])
    assert node.says("the grace period is short", "5.0 s", "give a longer --shutdown-timeout")
    # it may end between the last byte and the line; a line without a checkpoint would be wrong
    assert newest_step(run.saved) == 7 or not node.says("the checkpoint of step 7 is written")
    run.job.check_nothing_left()


def test_a_node_that_stays_goes_on_without_one_that_leaves_from_a_wait(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    run = Evaluating(
        job, tmp_path / "out", "--after-step", "7", "--only-first", endpoints=etcd.endpoint, nodes="1:2"
    )
    together = ["--rdzv-conf", "last_call_timeout=60"]
    nodes = [run.job.start(options=together), run.job.start(options=together)]
    run.await_long(1)
    evaluating = next(run.out.glob("takes-long-*")).name.removeprefix("takes-long-")
    (stays,) = (n for n in nodes if any(w.worker_id == evaluating for w in n.workers))
    (leaves,) = (n for n in nodes if n is not stays)
    leaves.send(signal.SIGTERM)
    assert leaves.process.wait(GRACE_S + 5.0) == 0
    assert leaves.says("worker ends", "goes on without this worker") and not leaves.says(SAVED)
    run.job.hurry()
    assert stays.process.wait(60) == 0
    assert run.job.ledger.check(SAMPLES, EPOCHS) == []
