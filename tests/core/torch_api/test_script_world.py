"""The workers that may begin, those that come too late, and refusals before any worker waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation, GenerationKind, Placement, StateName
from bagua_core.communication.communicator import Lane
from bagua_core.communication.step_interface import Model
from bagua_core.elastic.membership.session import AgentMessages
from bagua_core.torch_api.errors import LateWorkerError, NotLaunchedError
from bagua_core.torch_api.script_world import (
    Arrival,
    BeforeModels,
    ScriptWorld,
    absent_here,
    arrival,
    await_beginning,
    refuse_unknown_launcher,
)

ME = "me"


def record(number: int, base: int, kind: GenerationKind, **since: int) -> Generation:
    members = tuple(
        Placement(
            worker_id=name,
            agent_id="a",
            node_name="n",
            slot=rank,
            global_rank=rank,
            local_rank=rank,
            node_rank=0,
            store_address="10.0.0.1:1",
            since_generation=first,
            join_revision=rank + 1,
            holder=True,
        )
        for rank, (name, first) in enumerate(since.items())
    )
    return Generation(
        number=number, base=base, kind=kind, members=members, nonce="x", reason="", fingerprint={}
    )


PLANNED, FAILOVER = GenerationKind.PLANNED, GenerationKind.FAILOVER


@pytest.mark.parametrize(
    ("news", "expected"),
    [
        (AgentMessages(), Arrival.WAIT),
        (AgentMessages(generation=record(3, 2, PLANNED, other=1)), Arrival.WAIT),
        (AgentMessages(generation=record(1, 0, PLANNED, other=1, me=1)), Arrival.BEGIN),
        (AgentMessages(generation=record(7, 0, FAILOVER, me=7)), Arrival.BEGIN),
        # a loss before it looked
        (AgentMessages(generation=record(2, 1, FAILOVER, me=1)), Arrival.BEGIN),
        (AgentMessages(generation=record(3, 2, PLANNED, other=1, me=3)), Arrival.SUPERFLUOUS),
        (AgentMessages(generation=record(3, 2, FAILOVER, other=1, me=3)), Arrival.TOO_LATE),
        # ends are member.py's affair
        (AgentMessages(close=True), Arrival.BEGIN),
        (AgentMessages(leave=True), Arrival.BEGIN),
        (AgentMessages(refused="another model"), Arrival.BEGIN),
    ],
)
def test_what_a_record_means_for_a_worker_that_is_ready(news: AgentMessages, expected: Arrival) -> None:
    assert arrival(news, ME) is expected


class FakeMember:
    def __init__(self, *news: AgentMessages) -> None:
        self.said_ready = 0
        self._news = list(news)
        self.session = self
        self.changed: Any = self

    @property
    def news(self) -> AgentMessages:
        return self._news[0]

    def _say_ready(self) -> None:
        self.said_ready += 1

    # its condition: time passes, and there are news
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self, timeout_s: float) -> None:
        self._news.pop(0)


def test_it_says_that_it_is_ready_and_waits_for_the_leaders_word() -> None:
    member = FakeMember(
        AgentMessages(),
        AgentMessages(generation=record(1, 0, PLANNED, other=1)),
        AgentMessages(generation=record(2, 0, FAILOVER, me=2)),
    )
    await_beginning(cast(Any, member), ME)
    assert member.said_ready == 1


def test_one_that_is_not_needed_ends_well(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        await_beginning(
            cast(Any, FakeMember(AgentMessages(generation=record(3, 2, PLANNED, other=1, me=3)))), ME
        )
    assert end.value.code == 0
    assert "when the others had begun" in capfd.readouterr().err


def test_one_that_is_needed_fails_and_says_what_to_do() -> None:
    with pytest.raises(LateWorkerError, match=r"too few to go on.*--nnodes 1:4.*ElasticDataLoader"):
        await_beginning(
            cast(Any, FakeMember(AgentMessages(generation=record(3, 2, FAILOVER, other=1, me=3)))), ME
        )


def test_workers_that_missed_the_beginning_are_counted() -> None:
    environment = WorkerEnvironment("j", ME, "a", "socket", "host", slot=0, slots=3)
    assert absent_here(record(1, 0, PLANNED, me=1, other=1), environment) == 1
    assert absent_here(record(1, 0, PLANNED, me=1, other=1, third=1), environment) == 0


def test_other_launchers_are_refused_instead_of_training_alone_in_each_process() -> None:
    refuse_unknown_launcher({})
    refuse_unknown_launcher({"WORLD_SIZE": "1"})
    with pytest.raises(NotLaunchedError, match=r"WORLD_SIZE=4.*start the script with bagua-launch"):
        refuse_unknown_launcher({"WORLD_SIZE": "4", "RANK": "1"})


def test_a_checkpoint_of_the_job_and_a_loop_that_begins_at_its_first_batch_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"JOB_ID": "j", "WORKER_ID": ME, "AGENT_ID": "a", "SESSION_SOCKET": "s", "BIND_HOST": "h"}
    for name, value in {**values, "SLOT": "0", "SLOTS": "1", "CHECKPOINT_DIR": "/shared"}.items():
        monkeypatch.setenv(f"BAGUA_{name}", value)
    world = ScriptWorld(cast(Any, SimpleNamespace(member=FakeMember(AgentMessages()), launched=True)))
    with pytest.raises(ValueError, match=r"--checkpoint-dir.*ElasticDataLoader"):
        world.begin(elastic=False)
    world.begin(elastic=True)
    assert world.elastic and not world.joined


@pytest.mark.parametrize(
    ("joined", "generation", "has_state", "ends"),
    [
        (True, 0, False, True),
        (True, 0, True, False),  # all stepped aside, and keep their state until there are nodes enough
        (True, 4, False, False),
        (False, 0, False, False),
    ],
)
def test_a_worker_that_was_left_out_does_not_come_back(
    joined: bool, generation: int, has_state: bool, ends: bool
) -> None:
    name = StateName(3, 7, 0) if has_state else StateName()
    engine = SimpleNamespace(
        generation_number=generation, state=SimpleNamespace(name=name), member=None, launched=True
    )
    world = ScriptWorld(cast(Any, engine))
    world.joined = joined
    stands_in = BeforeModels(cast(Any, engine), world)
    if not ends:
        stands_in.communicator_changed()
        return
    with pytest.raises(SystemExit) as end:
        stands_in.communicator_changed()
    assert end.value.code == 0


def test_the_models_to_come_find_all_lanes() -> None:
    model: Model = BeforeModels(cast(Any, None), cast(Any, None))
    assert model.lanes == set(Lane) and not model.travelling() and not list(model.module.parameters())


def test_ranks_that_were_asked_for_are_fixed() -> None:
    world = ScriptWorld(cast(Any, SimpleNamespace(member=None, launched=True)))
    world.joined = True
    with pytest.raises(RuntimeError, match="asked for before init_process_group"):
        world.begin(elastic=True)
