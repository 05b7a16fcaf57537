"""Formats what the terminal shows of a job: one line per event. Pure text in, pure text out.

Lines read the same on a terminal and in a log file: a time, the node, what happened, why. `show` alone moves a cursor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from bagua_agent.base.plain_text import counted, duration, shortened, some
from bagua_agent.membership.failures import root_cause
from bagua_agent.membership.view import FailureView
from bagua_agent.rpc.message_pace import LineBudget
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.records import Generation, GenerationKind, Placement
from bagua_contract.replica import Replica

PROGRESS_EVERY_S = 5.0
MOST_NAMES = 6
LEAST_LOST_S = 0.01  # less has no name of its own
LONGEST_WORKER_LINE = 4000
SAME = "same workers"


def names(items: Iterable[str]) -> str:
    return some(sorted(set(items)), MOST_NAMES)


def describe_change(before: Generation | None, after: Generation) -> str:
    """Returns which nodes came and went from `before` to `after`, as "+host-3 -host-1"; workers where nodes stay."""
    if before is None:
        return names(m.node_name for m in after.members)
    was, now = _by_identity(before), _by_identity(after)
    parts = []
    for sign, ids, other, records in (
        ("+", now.keys() - was.keys(), was, now),
        ("-", was.keys() - now.keys(), now, was),
    ):
        staying = {m.agent_id for m in other.values()}
        whole = {records[i].node_name for i in ids if records[i].agent_id not in staying}
        single = {f"{records[i].node_name}:{records[i].slot}" for i in ids if records[i].agent_id in staying}
        if whole or single:
            parts.append(sign + names(whole | single))
    return " ".join(parts) or SAME


def _by_identity(generation: Generation) -> dict[str, Placement]:
    """Returns the members by what stays of them. In restart mode every worker is new, and its slot is what stays."""
    if generation.kind is GenerationKind.RESTART:
        return {f"{m.agent_id} {m.slot}": m for m in generation.members}
    return {m.worker_id: m for m in generation.members}


def generation_written(before: Generation | None, after: Generation) -> str:
    when = "at the next step boundary" if after.kind is GenerationKind.PLANNED and after.base else "now"
    if after.is_gathering:
        if not after.members:
            return after.reason
        return (
            f"generation {after.number}, before the loop: {_workers_of(after)} on "
            f"{counted(after.node_count, 'node')} "
            f"{'has its rank' if after.world_size == 1 else 'have their ranks'}; {after.reason}"
        )
    return f"generation {after.number}, {when}: {_members_and_reason(before, after)}"


def _members_and_reason(before: Generation | None, after: Generation) -> str:
    if not after.members:
        return f"no workers; {after.reason}"
    who = f"{_workers_of(after)} on {counted(after.node_count, 'node')}"
    change = describe_change(before, after)
    if _begins_training(before) and change == SAME:
        return f"{who}; {after.reason}"
    return f"{who} ({change}); {after.reason}"


def _begins_training(before: Generation | None) -> bool:
    """Tells whether the workers of the generation behind `before` have taken no step."""
    return before is not None and before.is_gathering


def _workers_of(generation: Generation) -> str:
    workers, size = counted(generation.world_size, "worker"), generation.replica_size
    return workers if size == 1 else f"{counted(generation.world_size // size, 'replica')} ({workers})"


def replica_assembled(replica: Replica) -> str:
    return f"{counted(replica.size, 'worker')} on {_nodes_of(replica)} form a replica"


def replica_over(replica: Replica, here: int) -> str:
    return (
        f"the replica on {_nodes_of(replica)} is over: {replica.over}; its {counted(here, 'worker')} here "
        f"{'starts' if here == 1 else 'start'} again"
    )


def replica_leaves(replica: Replica, leaving: str, here: int) -> str:
    return (
        f"{leaving} leaves, and with it the replica on {_nodes_of(replica)}: its {counted(here, 'worker')} here "
        f"{'leaves' if here == 1 else 'leave'} at the next step boundary and "
        f"{'starts' if here == 1 else 'start'} again"
    )


def replica_cut(replica: Replica, other: str) -> str:
    return (
        f"{other} does not answer this host: the replica on {_nodes_of(replica)} can't go on, and its workers here "
        "start again"
    )


def _nodes_of(replica: Replica) -> str:
    return some(dict.fromkeys(m.node_name for m in replica.members), MOST_NAMES)


def change_in_force(before: Generation | None, after: Generation, entered: session_pb2.Entered) -> str:
    """Describes the whole change in one line: since when, which workers train, why, and what it took of the worker that
    reports it. A job that begins to train had no steps to be without."""
    cost = "" if _begins_training(before) else _cost(entered)
    return f"{_since(entered)}: {_members_and_reason(before, after)}{cost}"


def in_force(entered: session_pb2.Entered) -> str:
    """Describes the change without the members; with what it took of the worker that reports it, if that one trained
    before."""
    return _since(entered) + _cost(entered)


def _since(entered: session_pb2.Entered) -> str:
    return f"generation {entered.generation} is in force from step {entered.step}"


def _cost(entered: session_pb2.Entered) -> str:
    if not entered.lost_s:
        return ""
    lost = {use: s for use, s in entered.lost_s.items() if s >= LEAST_LOST_S}
    if not lost:
        return f"; less than {LEAST_LOST_S:g} s without steps"
    uses = [f"{use.replace('_', ' ')} {s:.2g} s" for use, s in sorted(lost.items(), key=lambda u: -u[1])]
    named = ", ".join(uses) if len(uses) > 1 else next(iter(lost)).replace("_", " ")
    return f"; {sum(lost.values()):.2g} s without steps: {named}"


def whose_metrics(reporting: int, here: int, world_size: int) -> str:
    """Returns of which workers the shown numbers are the mean. reporting: workers here with a report of the generation.
    here: its members on this node. world_size: all its members."""
    if here < world_size:
        return " on this node"
    if world_size <= 1:
        return ""
    return (
        f", mean of {reporting} workers"
        if reporting == world_size
        else f", {reporting} of {world_size} workers"
    )


def job_loss(told: session_pb2.Progress, world_size: int) -> str:
    """Returns the mean of the losses that all workers of the job report; empty while it is not known."""
    if not told.job_losses:
        return ""
    whose = whose_metrics(told.job_losses, world_size, world_size)
    return f"  loss {told.job_loss:.4g}{whose}"


def progress(
    told: session_pb2.Progress, metrics: Mapping[str, float], whose: str = "", loss: str = ""
) -> str:
    """Describes the progress of the job, by a worker's report. metrics: what is shown in the place of the worker's own.
    whose: see whose_metrics. loss: see job_loss; in the place of the metric of that name."""
    here = {name: value for name, value in sorted(metrics.items()) if not (loss and name == "loss")}
    shown = "".join(f"  {name} {value:.4g}" for name, value in here.items())
    shown = loss + shown + (whose if shown else "")
    rate = told.steps_per_s  # 0: not known yet after the first step
    pace = f"  {rate:.1f} steps/s" if rate else ""
    if rate and told.step_samples:
        pace += f"  {rate * told.step_samples:.4g} samples/s"
    total = f" of {told.total_steps}" if told.total_steps else ""
    left = (
        f"  {duration((told.total_steps - told.step) / rate)} left"
        if rate and told.total_steps > told.step
        else ""
    )
    return f"epoch {told.epoch}  step {told.step}{total}{pace}{left}{shown}  (generation {told.generation})"


def mean_metrics(reports: Iterable[session_pb2.Progress]) -> dict[str, float]:
    """Returns the metrics that the workers' scripts report, each number as the mean over those that report it."""
    values: dict[str, list[float]] = {}
    for told in reports:
        for name, value in told.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


_ENDED_BEFORE = {
    pb.Result.SUCCEEDED: "succeeded",
    pb.Result.FAILED: "failed",
    pb.Result.STOPPED: "was stopped",
}


def ended_before(job_id: str, before: pb.Result, checkpoint_dir: str | None) -> str:
    """Says how the job of this id ended before, and that it is run again."""
    start = f"goes on from the newest checkpoint in {checkpoint_dir}" if checkpoint_dir else "begins anew"
    return f"job {job_id} {_ENDED_BEFORE.get(before.outcome, 'ended')} before ({before.reason}); it {start}"


def other_sizes(job_id: str, sizes: str) -> str:
    """Says that this node was started with other sizes, start size or cooldown than the job."""
    return (
        f"job {job_id} goes on with the sizes and cooldown that its first node was started with "
        f"(sizes: {sizes or 'any'}); those given here are ignored"
    )


def scaled(was: tuple[int, int], wanted: tuple[int, int]) -> str:
    return f"wanted now: {node_range(*wanted)}, instead of {node_range(*was)}"


def node_range(least: int, most: int) -> str:
    return counted(most, "node") if least == most else f"{least} to {counted(most, 'node')}"


def straggler(told: session_pb2.Straggler, placement: Placement | None) -> str:
    where = f"global rank {told.global_rank}"
    if placement is not None:
        where += f" ({placement.node_name}, slot {placement.slot})"
    if told.recovered:
        return f"{where} keeps pace again"
    times = f"{told.computing_s / told.others_s:.1f} times as long as" if told.others_s > 0 else "longer than"
    return (
        f"{where} is the slowest: it computes {told.computing_s:.3g} s a step, {times} the others "
        f"({told.others_s:.3g} s), and they wait for it"
    )


def suspicion(told: session_pb2.Suspected) -> str:
    """Describes the suspicion of a worker that lost its peers, or that can't reach new ones."""
    if told.kind == pb.Suspicion.UNBUILT:
        return f"a worker here goes on without the pending generation: {told.detail}"
    return f"a worker here waits for another generation: {told.detail}"


def result(
    job_id: str, ended: pb.Result, is_shown: Callable[[pb.Failure], bool] = lambda failure: False
) -> Iterator[str]:
    """Describes how the job ended and, if it failed, what failed first. is_shown(failure): this terminal has shown what
    that worker wrote, so its traceback is not repeated."""
    words = {pb.Result.SUCCEEDED: "succeeded", pb.Result.FAILED: "failed", pb.Result.STOPPED: "stopped"}
    yield f"job {job_id} {words.get(ended.outcome, 'ended')}: {ended.reason}"
    if not ended.HasField("failure"):
        return
    found = root_cause.RootCause(FailureView.of(ended.failure, 0), "")
    yield from root_cause.lines(found, is_shown=is_shown(ended.failure))
    if ended.casualties:
        yield ended.casualties


class JobTerminal:
    """Prefixes lines with time and node, and holds back progress that comes too often."""

    def __init__(
        self,
        say: Callable[[str], None],
        node_name: str,
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._say = say
        self._show = show
        self._node_name = node_name
        self._last: dict[str, str] = {}
        self._progress_at_s = float("-inf")
        self._worker_lines = LineBudget()

    def tell(self, text: str) -> None:
        self._say(f"bagua {time.strftime('%H:%M:%S')} {self._node_name} | {text}")

    def show(self, text: str) -> None:
        """Shows a line that the next one replaces, where stderr is a terminal."""
        self._show(f"bagua {time.strftime('%H:%M:%S')} {self._node_name} | {text}")

    def tell_once(self, topic: str, text: str) -> None:
        """Prints the text only if it differs from the last text on this topic."""
        if self._last.get(topic) != text:
            self._last[topic] = text
            self.tell(text)

    def forget(self, topic: str) -> None:
        """Forgets the last text on this topic, whose subject is over: the same text is news again."""
        self._last.pop(topic, None)

    def tell_of_worker(self, now_s: float, topic: str, text: str) -> None:
        """Prints what follows from a worker's word alone: as `tell_once`, in a bounded number of lines of bounded
        length."""
        if self._last.get(topic) == text:
            return
        self._last[topic] = text
        left_out = self._worker_lines.take(now_s)
        if left_out is None:
            return
        if left_out:
            self.tell(f"left out {left_out} lines about what workers here said: they came too fast")
        self.tell(shortened(text, LONGEST_WORKER_LINE))

    def tell_progress(self, now_s: float, text: Callable[[], str]) -> None:
        """Prints the progress if a line of it is due; `text` makes it only then: reports come more often."""
        if now_s - self._progress_at_s >= PROGRESS_EVERY_S:
            self._progress_at_s = now_s
            self.tell(text())
