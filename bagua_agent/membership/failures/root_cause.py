"""Finds which of several failures is the cause, and which are its casualties. Pure; one table of rules.

A worker that dies breaks its peers' collectives, and their reports often arrive first. So failures are ordered by how
far they explain themselves, and only then by arrival (the revision of their key). Reads the texts that exit_cause.py
writes. Invariant: a single failure is always the cause, since nothing explains it better.

The only place of that order: restart mode charges the first cause of a generation (restarting.py), live mode charges
everything but casualties of co-workers (secondary_failure.py), and the report sorts by it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from bagua_agent.base.plain_text import counted, first_of
from bagua_agent.membership.view import FailureView

REPLICA_OVER = "its replica is over"
"""How the cause of a worker begins that its agent killed because another worker of its replica was gone."""

# What follows, if that worker's host was silent. Such a worker may be alive, and raises once it finds its mate killed.
LOST_WITH_NODE = "is lost with its node"
KEY_IS_GONE = "is gone"
NO_ANSWER = "does not answer this host"

MOST_OTHERS = 3
TAIL_LINES = 12
ONE_TIME_S = 60.0  # a lost host's peers end within the time-outs of their collectives' connections


class Kind(IntEnum):
    """The kinds of endings, by how each explains itself; the least is the likeliest cause."""

    EXPLAINED = 0  # an exception of its own, or a fault signal
    KILLED = 1  # from outside without being asked: the kernel short of memory, a person
    SILENT = 2  # an exit code and no word
    NETWORK = 3  # a connection was lost: to a peer, or to something the script uses
    ASKED = 4  # asked to end
    CASUALTY = 5  # a collective, store or session failed because a peer or an agent was gone


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: re.Pattern[str]
    kind: Kind
    why: str


def _rule(pattern: str, kind: Kind, why: str) -> Rule:
    return Rule(re.compile(pattern), kind, why)


# The first that matches decides, so particular rules come before general ones.
RULES: tuple[Rule, ...] = (
    # NCCL refuses the script's request, or its GPU failed: no other worker caused it
    _rule(r"NCCL.*(invalid (usage|argument)|unhandled cuda error)", Kind.EXPLAINED, "NCCL was misused"),
    _rule(r"EADDRINUSE|[Aa]ddress already in use", Kind.EXPLAINED, "a port was taken"),
    _rule(r"^hung\b", Kind.EXPLAINED, "it hung"),
    _rule(rf"^{REPLICA_OVER}\b", Kind.CASUALTY, "another worker of its replica was gone"),
    _rule(r"gloo/|\bGloo\b.*(closed|reset|timed? ?out|fail)", Kind.CASUALTY, "a Gloo peer was lost"),
    _rule(r"Connection closed by peer \[|Read error \[.*\]:\d+", Kind.CASUALTY, "a Gloo peer was lost"),
    # Gloo's own words, where it gives no place in its source
    _rule(
        r"pair closure|Timed out waiting \d+ms for (send|recv|notification)",
        Kind.CASUALTY,
        "a Gloo peer was lost",
    ),
    _rule(r"NCCL ?[Ee]rror|ncclRemoteError|ncclSystemError|ncclInternalError", Kind.CASUALTY, "NCCL failed"),
    _rule(r"NCCL communicator was aborted|ncclCommAbort", Kind.CASUALTY, "NCCL was aborted"),
    _rule(r"[Ww]atchdog caught collective operation timeout", Kind.CASUALTY, "a peer did not come"),
    _rule(r"ProcessGroupNCCL('s)? (heartbeat|watchdog)", Kind.CASUALTY, "a peer did not come"),
    _rule(r"\bDist(Backend|Network|Store)Error\b", Kind.CASUALTY, "torch.distributed lost a peer"),
    _rule(r"torch\.distributed\S*Error", Kind.CASUALTY, "torch.distributed lost a peer"),
    _rule(r"monitoredBarrier|[Rr]anks? .* failed to (pass|call) ", Kind.CASUALTY, "a peer did not come"),
    _rule(r"TCPStore|[Ss]ocket [Tt]imeout.*store|client socket has", Kind.CASUALTY, "a store was lost"),
    _rule(r"\bCollective(Failed|Aborted)\b|collective (is )?broken", Kind.CASUALTY, "a collective broke"),
    _rule(r"\bJobClosing\b", Kind.CASUALTY, "a worker was lost after the end of the training"),
    _rule(r"\bStateGone\b", Kind.CASUALTY, "the job's state was lost with another worker"),
    _rule(r"its agent is gone|^exit code 75$", Kind.CASUALTY, "its agent was gone"),
    _rule(
        r"^(\w+\.)*(ConnectionError|Connection\w*Error|BrokenPipeError|EOFError|ProtocolError)\b",
        Kind.NETWORK,
        "a connection was lost",
    ),
    _rule(r"(Connection|connection) (reset|closed|aborted) by ", Kind.NETWORK, "a connection was lost"),
    _rule(r"[Bb]roken pipe", Kind.NETWORK, "a connection was lost"),
    _rule(r"^killed by SIG(TERM|INT|HUP|QUIT)\b", Kind.ASKED, "it was asked to end"),
    _rule(r"^killed by SIG(SEGV|ABRT|BUS|FPE|ILL|SYS|TRAP)\b", Kind.EXPLAINED, "a fault"),
    _rule(r"^killed by ", Kind.KILLED, "killed from outside"),
    _rule(r"^exit code \d+$", Kind.SILENT, "no word"),
)
_ITSELF = Rule(re.compile(""), Kind.EXPLAINED, "its own exception")

_KILLED_FOR_SILENCE = re.compile(
    rf"{REPLICA_OVER}: ((the worker in slot \d+ of )?\S+ ({LOST_WITH_NODE}|{KEY_IS_GONE}|{NO_ANSWER})\b(, | and )?)+"
    r"( \(killed by \w+\))?$"
)

# One exception was raised out of another: what it says first is not where it began.
_CHAINED = re.compile(r"direct cause of the following exception|another exception occurred")
# It had raised before the signal came, so the signal is not what began it.
_AFTER = re.compile(r"^killed by (signal )?\S+ after ")
_RAISED_TEXT = re.compile(r"^(?!\s)([A-Za-z_][\w.]*)(: .*)?$")


def classify(summary: str, traceback_tail: str = "") -> Rule:
    """Returns the rule that says what kind of ending this is. Both texts as in pb.Failure."""
    rule = _match(summary)
    if rule.kind is Kind.CASUALTY:
        return rule
    # Lines of a plain stderr say what was logged, not why it ended; a chain says where the exception came from, and
    # a bare code or fault has nothing else to say.
    if summary.startswith(("exit code ", "killed by SIGABRT")) or _CHAINED.search(traceback_tail):
        for line in traceback_tail.splitlines():
            if _RAISED_TEXT.match(line) and _match(line).kind is Kind.CASUALTY:
                return _match(line)
    return rule


def is_casualty(summary: str, traceback_tail: str = "") -> bool:
    """Tells whether an ending says of itself that something else failed before it."""
    return classify(summary, traceback_tail).kind is Kind.CASUALTY


def tells_of_another(summary: str, traceback_tail: str = "") -> bool:
    """Tells whether something else can have caused an ending: the worker was asked to end, or lost a connection or a
    peer."""
    return classify(summary, traceback_tail).kind >= Kind.NETWORK


def first_cause(failures: Iterable[FailureView]) -> FailureView | None:
    """Returns the failure that explains the others; None if there are no failures."""
    return min(failures, key=_likelihood, default=None)


def explains(cause: FailureView, other: FailureView) -> bool:
    """Tells whether `other`, which failed beside `cause`, is a casualty of it and not a failure of its own."""
    if cause.summary.startswith(REPLICA_OVER):
        # It may have been killed for the failure of `other`, but not where it was killed for a silent host.
        lost_peer = is_casualty(other.summary, other.traceback_tail)
        return lost_peer and _KILLED_FOR_SILENCE.match(cause.summary) is not None
    return tells_of_another(other.summary, other.traceback_tail) and _likelihood(cause) < _likelihood(other)


def _likelihood(failure: FailureView) -> tuple[Kind, int]:
    """Returns the sort key of a failure: the least is the likeliest cause."""
    return classify(failure.summary, failure.traceback_tail).kind, failure.order


def _match(text: str) -> Rule:
    text = _AFTER.sub("", text)
    return next((rule for rule in RULES if rule.pattern.search(text)), _ITSELF)


# -- the report


@dataclass(frozen=True, slots=True)
class RootCause:
    """The cause among several failures. others: failed by themselves too. casualties: everything that a lost peer
    explains, or a request to end."""

    cause: FailureView
    why: str
    others: tuple[FailureView, ...] = ()
    casualties: tuple[FailureView, ...] = ()


def root_cause(endings: Iterable[FailureView]) -> RootCause | None:
    """Returns what happened, from the failures of one generation and what followed it; None if there are no
    failures."""
    every = tuple(endings)
    cause = first_cause(every)
    return None if cause is None else beside(cause, every)


def beside(cause: FailureView, endings: Iterable[FailureView]) -> RootCause:
    """Returns what `cause` explains of the endings beside it, and what it does not explain. endings: may contain it."""
    others: list[FailureView] = []
    casualties: list[FailureView] = []
    for ending in sorted(endings, key=lambda e: e.order):
        if ending.worker_id == cause.worker_id:
            continue
        (casualties if explains(cause, ending) else others).append(ending)
    why = classify(cause.summary, cause.traceback_tail).why
    return RootCause(cause, why, tuple(others), tuple(casualties))


def of_one_time(cause: FailureView, endings: Iterable[FailureView]) -> list[FailureView]:
    """Returns the endings of the cause's generation; in a live job, whose failures all have generation 0, those that
    were seen within ONE_TIME_S of the cause."""

    def belongs(ending: FailureView) -> bool:
        if ending.generation or ending.seen_since_s == cause.seen_since_s:
            return ending.generation == cause.generation
        return not cause.generation and abs(ending.seen_since_s - cause.seen_since_s) <= ONE_TIME_S

    return [ending for ending in endings if belongs(ending)]


def lines(found: RootCause, *, is_shown: bool = False) -> Iterator[str]:
    """Yields the lines that a terminal shows. is_shown: it has shown what the cause wrote itself, traceback and all."""
    cause = found.cause
    files = f", files in {cause.log_path}" if cause.log_path else ""
    yield f"first failure: {_where(cause)}, {_how(cause.exit_code)}{files}"
    tail = [] if is_shown else cause.traceback_tail.splitlines()[-TAIL_LINES:]
    if not is_shown and not any(cause.summary in line for line in tail):
        yield f"    {cause.summary}"
    for line in tail:
        yield f"    {line}"
    others = (f"also failed: {_where(o)}, {_how(o.exit_code)}: {o.summary}" for o in found.others)
    yield from first_of(others, MOST_OTHERS, "failed by themselves")
    if found.casualties:
        yield casualties_line(found)


def casualties_line(found: RootCause) -> str:
    """Counts the failures that tell of the cause and not of themselves, as "and 7 casualties on 2 nodes"."""
    nodes = len({c.node_name for c in found.casualties})
    return f"and {counted(len(found.casualties), 'casualty', 'casualties')} on {counted(nodes, 'node')}"


def _where(ending: FailureView) -> str:
    rank = f"global rank {ending.global_rank}" if ending.global_rank >= 0 else "in no generation yet"
    return f"{ending.node_name}, slot {ending.slot}, {rank}"


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"  # a real-time signal has no name
