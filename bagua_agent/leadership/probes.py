"""Asks agents whether they live, and touches their hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagua_agent.base.background import Background, Failed, OperationEnd
from bagua_agent.leadership.reports import ProbeFailed, ProbeResult, Report, Touched
from bagua_agent.membership.actions import Question
from bagua_agent.membership.view import ProbeVerdict
from bagua_agent.rpc.control_client import probe, probe_through
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_agent.rpc.reachability import Reachability, reach_all
from bagua_contract import control_pb2

MOST_PROBES_AT_ONCE = 16


class Probes:
    """Threads that ask agents. window_s: how long an agent has for its answer."""

    def __init__(self, identity: JobIdentity, window_s: float, report: Callable[[Report], None]) -> None:
        self._identity = identity
        self._window_s = window_s
        self._report = report
        self._probers = Background("bagua-probe", MOST_PROBES_AT_ONCE)
        self._toucher = Background("bagua-touch")  # apart: silence of many must not keep a probe waiting

    def ask(self, question: Question, sequence: int) -> None:
        """Asks an agent whether it lives. Reports one direct answer and, if there is a relay, one relayed; ProbeFailed
        if it could not be asked."""
        window_s = self._window_s

        def ask_one(relayed: bool, asked: Callable[[], control_pb2.ProbeReply]) -> None:
            def ended(end: OperationEnd[control_pb2.ProbeReply]) -> None:
                if isinstance(end, Failed):
                    self._report(ProbeFailed(question.agent_id, end.reason))
                else:
                    self._report(_result(question, sequence, relayed, end.value))

            self._probers.run(f"asking agent {question.agent_id}", asked, ended)

        ask_one(False, lambda: probe(self._identity, question.control_address, question.agent_id, window_s))
        if question.relay_agent_id:
            ask_one(
                True,
                lambda: probe_through(
                    self._identity,
                    question.relay_address,
                    question.control_address,
                    question.agent_id,
                    window_s,
                ),
            )

    def touch(self, addresses: Mapping[str, str]) -> None:
        """Touches agents and reports Touched. addresses: agent -> control address."""

        def ended(end: OperationEnd[dict[str, Reachability]]) -> None:
            self._report(Touched({} if isinstance(end, Failed) else end.value))

        window_s = self._window_s
        self._toucher.run("touching agents", lambda: reach_all(addresses, window_s), ended)

    def stop(self) -> None:
        """Ends the threads."""
        self._toucher.stop()
        self._probers.stop()


def _result(question: Question, sequence: int, relayed: bool, reply: control_pb2.ProbeReply) -> ProbeResult:
    verdict = ProbeVerdict(reply.verdict)
    workers = tuple(reply.workers) if verdict is ProbeVerdict.ALIVE else None
    return ProbeResult(question.agent_id, sequence, relayed, verdict, workers)
