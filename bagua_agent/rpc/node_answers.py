"""The answers of an agent to people who look at its job: its node, the newest output of a slot, stacks and collectives.

An interface for the control server; job/own_answers.py implements it.
"""

from __future__ import annotations

from typing import Protocol

from bagua_contract import control_pb2


class NodeAnswers(Protocol):
    """The interface of these answers. Each call is bounded and may come from several threads."""

    def node(self) -> control_pb2.ReadNodeReply: ...

    def output(
        self, slot: int, stream: control_pb2.ReadOutputRequest.Stream, position: int
    ) -> control_pb2.ReadOutputReply: ...

    def stacks(self, slot: int) -> control_pb2.ReadStacksReply: ...

    def collectives(self, slot: int) -> control_pb2.ReadCollectivesReply: ...


class NoAnswers:
    """The answers of an agent that shows nothing."""

    def node(self) -> control_pb2.ReadNodeReply:
        return control_pb2.ReadNodeReply()

    def output(
        self, slot: int, stream: control_pb2.ReadOutputRequest.Stream, position: int
    ) -> control_pb2.ReadOutputReply:
        return control_pb2.ReadOutputReply()

    def stacks(self, slot: int) -> control_pb2.ReadStacksReply:
        return control_pb2.ReadStacksReply(problem="this agent shows no stacks")

    def collectives(self, slot: int) -> control_pb2.ReadCollectivesReply:
        return control_pb2.ReadCollectivesReply(problem="this agent shows no collectives")
