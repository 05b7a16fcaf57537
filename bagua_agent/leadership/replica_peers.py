"""Knows the agents that a node touches in a job with replicas: those that hold parts of its replicas, or did.

Whether a former one answers is remembered, since a replica that is formed anew across a cut would else wait for an
agent that was never met. Where all keys are seen, an agent is there as long as its key. In a large job the records have
the addresses, and no key says that an agent is gone: former ones are limited in number there. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from bagua_agent.membership.view import AgentView
from bagua_contract.replica import Replica

# Half of a round of touches (host_watch.py): hosts that are gone for good leave the rest to those that are needed.
MOST_FORMER = 8


class ReplicaPeers:
    def __init__(self, agent_id: str) -> None:
        self._agent_id = agent_id
        self._known: dict[str, str] = {}  # agent -> control address; those of present replicas last

    def addresses(
        self,
        replicas: Iterable[Replica],
        agents: Mapping[str, AgentView],
        *,
        whole: bool,
        met: Collection[str],
    ) -> dict[str, str]:
        """Returns the control addresses, by agent. replicas: of the job. agents: with keys that this agent follows;
        whole: that is all of them. met: agents that have answered."""
        mine = (r for r in replicas if self._agent_id in r.agent_ids)
        listed = {
            m.agent_id: m.control_address for r in mine for m in r.members if m.agent_id != self._agent_id
        }
        former = {a: address for a, address in self._known.items() if a not in listed}
        if not whole:
            former = dict([(a, address) for a, address in former.items() if a in met][-MOST_FORMER:])
        found = former | listed
        found |= {a: agents[a].control_address for a in found if a in agents}
        # a record of an older leader has no address
        self._known = {a: address for a, address in found.items() if address and (a in agents or not whole)}
        return dict(self._known)
