"""Chooses the transport of a generation's GPU tensors: NCCL, or Gloo by way of the CPU. Pure.

Takes what every member says about itself; one member asks, and tells the others (transport_agreement.py), so all do the
same. Tensors of the CPU travel by Gloo in any case.

A member wants NCCL when its script has something on a GPU by the time it joins (gpu_in_use.py), and not because its
machine has one: NCCL takes memory of each GPU and seconds to begin, which a job on the CPU must not pay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from bagua_contract.environment import variable

VARIABLE = variable("transport")


class Setting(Enum):
    """BAGUA_TRANSPORT. AUTO: NCCL where all members can. GLOO: never NCCL. NCCL: nothing else, or the worker fails."""

    AUTO = "auto"
    GLOO = "gloo"
    NCCL = "nccl"

    @staticmethod
    def read(text: str) -> Setting:
        """Raises ValueError naming the variable and what it may be."""
        try:
            return Setting(text)
        except ValueError as error:
            choices = ", ".join(s.value for s in Setting)
            raise ValueError(f"{VARIABLE}={text!r} is none of {choices}") from error


@dataclass(frozen=True, slots=True)
class Statement:
    """A member's report about itself.

    uses_gpu: the script has something on a GPU. obstacle: why NCCL can't be used here, and what to do about it; empty
    if it can. The rest counts only where there is none: nccl_version as NCCL numbers it; gpu: its name among all GPUs
    of the job, as NCCL tells them apart; may_share: other ranks may use the same one.
    """

    setting: Setting
    uses_gpu: bool = False
    obstacle: str = ""
    nccl_version: int = 0
    gpu: str = ""
    may_share: bool = False

    def to_text(self) -> str:
        return json.dumps({**asdict(self), "setting": self.setting.value})

    @staticmethod
    def from_text(text: str) -> Statement:
        """Raises ValueError, TypeError, KeyError for what is none."""
        found = json.loads(text)
        return Statement(**{**found, "setting": Setting(found["setting"])})


@dataclass(frozen=True, slots=True)
class Choice:
    """is_nccl: else Gloo. is_refused: a member insists on NCCL, and it can't be. is_notable: a member's GPU is slower
    for it, so the user should read `reason`, which says what to do."""

    is_nccl: bool
    reason: str
    is_refused: bool = False
    is_notable: bool = False

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Choice:
        """Raises ValueError, TypeError for what is none."""
        return Choice(**json.loads(text))


def choose(said: Sequence[Statement]) -> Choice:
    """said: by all members of the generation, by global_rank."""
    insisting = _ranks(said, lambda s: s.setting is Setting.NCCL)
    users = _ranks(said, lambda s: s.uses_gpu)
    obstacle = _against(said, insisting, users)
    if obstacle is None:
        return Choice(True, f"tensors of GPUs travel by NCCL {_version(said[0].nccl_version)}")
    if insisting:
        return Choice(
            False,
            f"{VARIABLE}=nccl (global ranks {insisting}) can't be: {obstacle}. {VARIABLE}=auto takes Gloo instead",
            is_refused=True,
        )
    refusing = any(s.setting is Setting.GLOO for s in said)
    return Choice(
        False,
        f"tensors of GPUs travel by Gloo, through the CPU: {obstacle}",
        is_notable=bool(users) and not refusing,
    )


def _against(said: Sequence[Statement], insisting: list[int], users: list[int]) -> str | None:
    """Why it can't be NCCL, with what to do; None if it can."""
    if refusing := _ranks(said, lambda s: s.setting is Setting.GLOO):
        return f"{VARIABLE}=gloo on global ranks {refusing}"
    if not users and not insisting:
        return "no member's script uses one"
    if idle := _ranks(said, lambda s: not s.uses_gpu):
        return (
            f"global ranks {idle} had nothing on a GPU when they joined. Move the model there before it is wrapped; a "
            "script that begins without one calls torch.cuda.set_device(local rank) before init_process_group"
        )
    if hindered := _ranks(said, lambda s: bool(s.obstacle)):
        return f"on global ranks {hindered}: {said[hindered[0]].obstacle}"
    versions = sorted({s.nccl_version for s in said})
    if len(versions) > 1:
        names = " and ".join(_version(v) for v in versions)
        return f"members have NCCL {names}; install the same nvidia-nccl on all nodes"
    by_gpu: dict[str, list[int]] = {}
    for global_rank, statement in enumerate(said):
        by_gpu.setdefault(statement.gpu, []).append(global_rank)
    for gpu, ranks in by_gpu.items():
        if len(ranks) > 1 and not all(said[r].may_share for r in ranks):
            return (
                f"global ranks {ranks} use one GPU ({gpu}), which NCCL refuses. Give each its own (slot i of a node: "
                "torch.cuda.set_device(local rank)), or each its own NCCL_HOSTID"
            )
    return None


def _ranks(said: Sequence[Statement], holds: Callable[[Statement], bool]) -> list[int]:
    return [global_rank for global_rank, statement in enumerate(said) if holds(statement)]


def _version(number: int) -> str:
    """22707 is 2.27.7."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
