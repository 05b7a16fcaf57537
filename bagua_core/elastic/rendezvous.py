"""How do the members of a generation meet? Each worker serves a store; rank 0's serves the generation.

Owns the server and the threads that build communicators. Connecting can't be interrupted, so it happens in a
thread that is abandoned when its generation is; the result is then retired, never destroyed.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from bagua_contract.records import Generation
from bagua_core.communication import lanes
from bagua_core.communication.communicator import AbortFlag, Communicator, Lane
from bagua_core.communication.gloo import GlooCommunicator, build_gloo
from bagua_core.communication.meeting_store import MeetingServer, MeetingStore

MEETING_TIMEOUT_S = 60.0
ALL = "all"  # the generation's main communicator, in the store
CONNECT_TIMEOUT_S = (
    20.0  # to each member, once all have said where they listen; a pending generation waits for it
)
MOST_DESCRIPTORS = 65536
# A rank may compute for as long as it likes before it comes to a collective: what bounds a wait is the
# generation, which a loss ends, not Gloo's clock.
OPERATION_TIMEOUT_S = 86400.0


def allow_descriptors() -> None:
    """As many open files as the system lets us have: a generation that was lost leaves its connections behind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Building:
    """A communicator under construction. Read `communicator`/`error` once `done`."""

    def __init__(self, generation: Generation, suffix: str, members: tuple[int, ...]) -> None:
        self.generation = generation
        self.suffix = suffix
        self.members = members
        self.abort_flag = AbortFlag()
        self.done = False
        self.communicator: Communicator | None = None
        self.error: Exception | None = None

    def abandon(self, reason: str) -> None:
        self.abort_flag.set(reason)


class Rendezvous:
    def __init__(
        self,
        worker_id: str,
        bind_host: str,
        changed: threading.Condition,
        on_failure: Callable[[int, Exception], None],
    ) -> None:
        """on_failure(generation, error): from the builder's thread, unless the building was abandoned."""
        allow_descriptors()
        self.lanes: frozenset[Lane] = frozenset()  # that every main communicator built from now on brings
        self._on_failure = on_failure
        self._worker_id = worker_id
        self._bind_host = bind_host
        self._changed = changed
        self._server = MeetingServer(bind_host)

    @property
    def address(self) -> str:
        host = f"[{self._bind_host}]" if ":" in self._bind_host else self._bind_host
        return f"{host}:{self._server.port}"

    def start(
        self, generation: Generation, members: tuple[int, ...] | None = None, suffix: str = ALL
    ) -> Building:
        """Begin to build among `members` (global ranks, ascending; default all). Wakes `changed` when done."""
        building = Building(generation, suffix, members or tuple(range(generation.world_size)))
        threading.Thread(
            target=self._build, args=(building,), name=f"bagua-build-{generation.number}", daemon=True
        ).start()
        return building

    def _connect(
        self, building: Building, members: tuple[int, ...], global_rank: int, store: PrefixStore
    ) -> GlooCommunicator:
        return build_gloo(
            building.generation.number,
            members.index(global_rank),
            len(members),
            store,
            self._bind_host,
            OPERATION_TIMEOUT_S,
            building.abort_flag,
            CONNECT_TIMEOUT_S,
        )

    def _lanes(
        self, building: Building, main: GlooCommunicator, store: PrefixStore
    ) -> dict[Lane, Communicator]:
        built: dict[Lane, Communicator] = {}
        for lane in sorted(self.lanes, key=lambda lane: lane.value):
            members = lanes.members_of(lane, main.nodes, main.global_rank)
            if members is not None:
                prefix = f"{lane.value}/{members[0]}"
                built[lane] = self._connect(building, members, main.global_rank, PrefixStore(prefix, store))
        return built

    def _build(self, building: Building) -> None:
        generation = building.generation
        store: MeetingStore | None = None
        try:
            own = generation.placement_of(self._worker_id)
            if own is None:
                raise ValueError(f"{self._worker_id} is not in generation {generation.number}")
            host, _, port = generation.members[building.members[0]].store_address.rpartition(":")
            store = MeetingStore(host.strip("[]"), int(port), MEETING_TIMEOUT_S)
            building.abort_flag.add_waiter(store.interrupt)
            prefix = f"{generation.nonce}/{generation.number}/{building.suffix}"
            main = self._connect(building, building.members, own.global_rank, PrefixStore(prefix, store))
            if building.suffix == ALL:
                main.nodes = lanes.nodes_of([m.agent_id for m in generation.members])
                main.lanes = self._lanes(building, main, PrefixStore(f"{prefix}/lanes", store))
            building.communicator = main
        except Exception as error:  # noqa: BLE001 (whatever the transport raises; the member reports it)
            building.error = error
            if not building.abort_flag.is_set():
                self._on_failure(generation.number, error)
        finally:
            if store is not None:  # all addresses are known; a group that is built needs no store
                building.abort_flag.remove_waiter(store.interrupt)
                store.close()
        with self._changed:
            building.done = True
            self._changed.notify_all()
