"""Chooses the transport of a generation's GPU tensors: a registered one, or Gloo by way of the CPU. Pure.

Takes the statement that every member makes about itself. One member collects the statements and sends the choice to the
others (transport_agreement.py), so all do the same. Tensors of the CPU travel by Gloo in any case.

A member wants a transport for GPUs when its script has something on a GPU by the time it joins (gpu_in_use.py), and not
because its machine has one: such a transport takes memory of each GPU and seconds to begin, which a job on the CPU must
not pay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol, TypeVar

from bagua_contract.environment import variable

VARIABLE = variable("transport")
AUTO, GLOO = "auto", "gloo"
"""Values of BAGUA_TRANSPORT. AUTO: the first transport that all members can use. GLOO: none of them. Any other value is
the name of a transport: that one, or the worker fails."""

T = TypeVar("T")
Facts = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ability:
    """A member's report about one transport. obstacle: why it can't be used here, and what to do about it; empty if it
    can. facts: what the other members must know of it; only where there is no obstacle."""

    obstacle: str = ""
    facts: Facts = field(default_factory=dict)


class Compared(Protocol):
    """The part of a transport that a choice needs."""

    name: str
    """In BAGUA_TRANSPORT."""

    def title(self, said: Sequence[Facts]) -> str:
        """Returns the transport's name for people."""

    def against(self, said: Sequence[Facts]) -> str | None:
        """Returns why members with these facts (by global_rank) can't use it together, and what to do; None if they
        can."""


def check_setting(setting: str, transports: Sequence[Compared]) -> str:
    """Returns `setting` if it is a valid value of the variable. Raises ValueError with the variable and its possible
    values."""
    choices = [AUTO, GLOO, *(t.name for t in transports)]
    if setting not in choices:
        raise ValueError(f"{VARIABLE}={setting!r} is none of {', '.join(choices)}")
    return setting


@dataclass(frozen=True, slots=True)
class Statement:
    """A member's report about itself. uses_gpu: the script has something on a GPU. abilities: by transport."""

    setting: str
    uses_gpu: bool = False
    abilities: Mapping[str, Ability] = field(default_factory=dict)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Statement:
        """Reads a statement. Raises ValueError, TypeError, KeyError or AttributeError if the text is not one."""
        found = json.loads(text)
        abilities = {str(name): Ability(**ability) for name, ability in found["abilities"].items()}
        return Statement(**{**found, "abilities": abilities})


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport that all members use. transport: its name; empty for Gloo by way of the CPU. is_refused: a member
    insists on a transport that can't be used. is_notable: a member's GPU is slower for it, so the user should read
    `reason`, which says what to do."""

    transport: str
    reason: str
    is_refused: bool = False
    is_notable: bool = False

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Choice:
        """Reads a choice. Raises ValueError or TypeError if the text is not one."""
        return Choice(**json.loads(text))


def choose(said: Sequence[Statement], transports: Sequence[Compared]) -> Choice:
    """Chooses the transport of a generation. said: the statements of all its members, by global_rank. transports: the
    preferred one first."""
    insisting = _ranks(said, lambda s: s.setting not in (AUTO, GLOO))
    wanted = [t for t in transports if not insisting or t.name == said[insisting[0]].setting]
    obstacles = []
    for transport in wanted:
        obstacle = _against(transport, said, insisting)
        if obstacle is None:
            title = transport.title([s.abilities[transport.name].facts for s in said])
            return Choice(transport.name, f"tensors of GPUs travel by {title}")
        if obstacle not in obstacles:
            obstacles.append(obstacle)
    why = "; ".join(obstacles) or "there is no transport for them"
    if insisting:
        return Choice(
            "",
            f"{VARIABLE}={said[insisting[0]].setting} (global ranks {insisting}) can't be: {why}. "
            f"{VARIABLE}=auto takes Gloo instead",
            is_refused=True,
        )
    refusing = any(s.setting == GLOO for s in said)
    return Choice(
        "",
        f"tensors of GPUs travel by Gloo, through the CPU: {why}",
        is_notable=any(s.uses_gpu for s in said) and not refusing,
    )


def _against(transport: Compared, said: Sequence[Statement], insisting: list[int]) -> str | None:
    """Returns why the members can't use this transport, with what to do; None if they can."""
    for setting in sorted({s.setting for s in said} - {AUTO, transport.name}):
        return f"{VARIABLE}={setting} on global ranks {_ranks(said, lambda s, of=setting: s.setting == of)}"  # type: ignore[misc]
    users = _ranks(said, lambda s: s.uses_gpu)
    if not users and not insisting:
        return "no member's script uses one"
    if idle := _ranks(said, lambda s: not s.uses_gpu):
        return (
            f"global ranks {idle} had nothing on a GPU when they joined. Move the model there before it is wrapped; a "
            "script that begins without one calls torch.cuda.set_device(local rank) before init_process_group"
        )
    if lacking := _ranks(said, lambda s: transport.name not in s.abilities):
        return f"global ranks {lacking} have no transport {transport.name!r}; register it in every worker"
    abilities = [s.abilities[transport.name] for s in said]
    if hindered := _ranks(abilities, lambda a: bool(a.obstacle)):
        return f"on global ranks {hindered}: {abilities[hindered[0]].obstacle}"
    return transport.against([a.facts for a in abilities])


def _ranks(said: Sequence[T], holds: Callable[[T], bool]) -> list[int]:
    return [global_rank for global_rank, one in enumerate(said) if holds(one)]
