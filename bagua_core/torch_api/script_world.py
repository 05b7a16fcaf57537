"""Decides which workers are in a script's world when it asks for its ranks before it has a model.

Scripts of the original compute shards and learning rates from rank and world size right after `init_process_group`, and
count their own epochs. So their workers join before there is a model, and none can come in later: a plain loop would
begin at its first batch while the others are in the middle. Such a world only shrinks. `elastic` scripts promise to
draw from ElasticDataLoader (or to call next_step) instead and join at their first step, as all others of this runtime.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation, GenerationKind
from bagua_contract.step_settings import StepSettings
from bagua_core.communication.communicator import Communicator, Lane
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.membership.session import AgentMessages
from bagua_core.elastic.script_collectives import default_group
from bagua_core.elastic.step import runtime
from bagua_core.elastic.step.engine import Engine
from bagua_core.torch_api.errors import LateWorkerError, NotLaunchedError
from bagua_core.torch_api.loop_steps import LoopSteps

LOOK_AGAIN_S = 1.0  # a fallback only: news wakes the threads that wait for it


class ScriptWorld:
    """The world of the script of one engine, and whether this worker is in it.

    joined: this worker's ranks are known. elastic: see the module. is_initialized: init_process_group was called.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.joined = False
        self.elastic = False
        self.is_initialized = False

    def begin(self, elastic: bool) -> None:
        """Does what init_process_group asks for. Raises NotLaunchedError, LateWorkerError, ValueError, RuntimeError."""
        self._begin(elastic)
        self.is_initialized = True

    def _begin(self, elastic: bool) -> None:
        if not self._engine.launched:
            refuse_unknown_launcher(os.environ)
            self.elastic = elastic
            return
        if not elastic:
            self.join()
        elif self.joined:
            raise RuntimeError(
                "rank or world size was asked for before init_process_group(elastic=True); ask after it"
            )
        self.elastic = elastic

    def join(self) -> None:
        """Makes this worker a member now, at the latest. Blocks until the job has its first workers; one that comes
        later ends here (SystemExit). Raises LateWorkerError, ValueError."""
        engine, member = self._engine, self._engine.member
        if self.joined or self.elastic or member is None:
            return
        environment = WorkerEnvironment.decode(os.environ)
        if environment.checkpoint_dir:
            raise ValueError(
                "--checkpoint-dir makes a job go on where it was, but a plain loop begins at its first batch; leave "
                "the option out and let the script load its own checkpoint, or use ElasticDataLoader with "
                "init_process_group(elastic=True)"
            )
        # The step's random numbers follow from the script's seed, where it has set one.
        engine.inputs.seed = torch.initial_seed()
        engine.attach_model(BeforeModels(engine, self))
        await_beginning(member, environment.worker_id)
        engine.boundary()
        self.joined = True
        record = member.generation
        if record is not None and (absent := absent_here(record, environment)):
            say(
                f"the job begins without {absent} of this node's {environment.slots} workers, which were not ready in "
                "time, and a plain loop takes in no late workers; --rdzv-conf node_window=60 waits longer for them"
            )


def say(text: str) -> None:
    print(f"bagua: {text}", file=sys.stderr, flush=True)


def absent_here(record: Generation, environment: WorkerEnvironment) -> int:
    """Returns the number of this node's workers that are not in `record`."""
    return environment.slots - sum(1 for m in record.members if m.agent_id == environment.agent_id)


def refuse_unknown_launcher(environment: Mapping[str, str]) -> None:
    """Raises NotLaunchedError if another launcher started several processes: each would train alone, in silence."""
    said = environment.get("WORLD_SIZE", "1")
    if said not in ("", "1"):
        raise NotLaunchedError(
            f"WORLD_SIZE={said}, but this process was not started by bagua-launch, so it would train alone; start the "
            "script with bagua-launch"
        )


# -- a worker that comes when others train already


class Arrival(Enum):
    WAIT = "wait"  # for a record that lists this worker, or for the end
    BEGIN = "begin"  # with all others, or go where member.py says
    SUPERFLUOUS = "superfluous"  # the others go on without it
    TOO_LATE = "too late"  # they can't, for they are fewer than the least


def arrival(news: AgentMessages, worker_id: str) -> Arrival:
    """Returns the action of a ready worker that can begin at the first batch only, after the leader's decision."""
    if news.close or news.leave or news.refused:
        return Arrival.BEGIN
    record = news.generation
    placement = record.placement_of(worker_id) if record is not None else None
    if record is None or placement is None:
        return Arrival.WAIT
    if record.base == 0 or placement.since_generation <= record.base:
        return Arrival.BEGIN
    # joiners are in a record of a loss only where the survivors are fewer than the least
    return Arrival.TOO_LATE if record.kind is GenerationKind.FAILOVER else Arrival.SUPERFLUOUS


def await_beginning(member: Member, worker_id: str) -> None:
    """Returns when this worker begins together with all others. Raises SystemExit(0) if they begin without it.

    Raises LateWorkerError if they can't go on.
    """
    member._say_ready()
    while True:
        news = member.session.news
        match arrival(news, worker_id):
            case Arrival.BEGIN:
                return
            case Arrival.SUPERFLUOUS:
                say(f"worker ends: {_LATE}, and they go on without it")
                raise SystemExit(0)
            case Arrival.TOO_LATE:
                raise LateWorkerError(
                    f"{_LATE}, and they are too few to go on. Start the job again from the script's own checkpoint; "
                    "with a range of nodes (--nnodes 1:4) it goes on with the workers that are left, and with "
                    "ElasticDataLoader (docs/original-scripts.md) it takes in others"
                )
            case Arrival.WAIT:
                with member.changed:
                    if member.session.news is news:
                        member.changed.wait(LOOK_AGAIN_S)


_LATE = "it came when the others had begun, and a plain loop takes in no late workers"


class BeforeModels:
    """The model that the engine has until the script wraps its own: generations are made before that, and must bring
    all that these may need. Ends a worker that was left out: its loop has made no progress, the others' have."""

    module = nn.Module()
    optimizers: list[torch.optim.Optimizer] = []  # noqa: RUF012 (as in step_interface.Model)
    algorithm_name = "plain loop"
    equal_states = True
    lanes = frozenset(Lane)
    is_unfinished = False
    has_local_gradients = False
    round_steps = None
    readiness = ()
    bucket_times = ()
    warms_up = False

    def __init__(self, engine: Engine, world: ScriptWorld) -> None:
        self._engine = engine
        self._world = world

    def use_settings(self, settings: StepSettings) -> str:
        return ""

    def travelling(self) -> Mapping[str, torch.Tensor]:
        return {}

    def put_gradient(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        return None

    def copy_begins(self) -> None:
        return None

    def close_round(self, communicator: Communicator | None, weight: float, source: int) -> None:
        return None

    def at_round_begin(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_shards(self) -> None:
        return None

    def step_committed(self) -> None:
        return None

    def finish(self, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        return None

    def step_rolled_back(self) -> None:
        return None

    def detach(self) -> None:
        """Does nothing, for there are no hooks; see step_interface.Model."""

    def state_replaced(self) -> None:
        return None

    def communicator_changed(self) -> None:
        engine = self._engine
        is_out = engine.generation_number == 0 and engine.state.name.is_none
        if self._world.joined and is_out:
            say("worker ends: the others went on without it, and a plain loop takes in no late workers")
            raise SystemExit(0)


# -- the one of this process


@dataclass(frozen=True, slots=True)
class Script:
    """The state of this surface for the running script."""

    engine: Engine
    world: ScriptWorld
    steps: LoopSteps


_scripts: weakref.WeakKeyDictionary[Engine, Script] = weakref.WeakKeyDictionary()


def script_of(engine: Engine) -> Script:
    found = _scripts.get(engine)
    if found is None:
        found = _scripts[engine] = Script(engine, ScriptWorld(engine), LoopSteps(engine))
    return found


def this_script() -> Script:
    if default_group.is_in_use() and WorkerEnvironment.is_present(os.environ):
        from bagua_core.torch_api.torch_default_group import take_over  # late: it needs this module

        take_over()
    return script_of(runtime.engine())


def is_initialized() -> bool:
    """Tells whether the script has called init_process_group."""
    return any(script.world.is_initialized for script in _scripts.values())
