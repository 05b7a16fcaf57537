"""Connects the members of a generation. Each worker serves a meeting store; rank 0's serves the generation.

Owns the server and the threads that build communicators. Connecting can't be interrupted, so it happens in a
thread that is abandoned when its generation is; the result is then retired, never destroyed. What carries tensors of
GPUs is decided once a generation, with its main communicator, and holds for all others of it.
"""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from bagua_contract.addresses import joined, parted
from bagua_contract.records import Generation, GenerationKind
from bagua_core.communication.communicator import AbortFlag, Communicator, Lane
from bagua_core.communication.topology import lanes
from bagua_core.communication.topology.routes import lanes_for
from bagua_core.communication.transport_choice import AUTO, Choice
from bagua_core.communication.transports import transport_agreement
from bagua_core.communication.transports.by_device import ByDevice
from bagua_core.communication.transports.gloo import build_gloo
from bagua_core.communication.transports.gpu_transport import TRANSPORTS, GpuTransport, statement
from bagua_core.communication.transports.meeting_store import MeetingServer, MeetingStore
from bagua_core.communication.transports.staged import Staged
from bagua_core.errors import UserError

MEETING_TIMEOUT_S = 60.0
ALL = "all"  # the generation's main communicator, in the store
# to each member, once all have said where they listen; a pending generation waits for it
CONNECT_TIMEOUT_S = 20.0
MOST_DESCRIPTORS = 65536
CHOICES_KEPT = 1024  # a pending generation may be made anew often before the one in force ends
# A rank may compute for as long as it likes before it comes to a collective: what bounds a wait is the
# generation, which a loss ends, not Gloo's clock.
OPERATION_TIMEOUT_S = 86400.0


def allow_descriptors() -> None:
    """Allows as many open files as the system lets us have: a generation that was lost leaves its connections
    behind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class TransportRefused(UserError, RuntimeError):
    """The script's environment insists on a transport that the members can't all use."""


@dataclass(frozen=True, slots=True)
class OnGpu:
    transport: GpuTransport
    device: torch.device


class Building:
    """A communicator under construction. Read `communicator`/`error` once `done`.

    is_connected: what is left must not run beside kernels of another communicator; it begins when all members have
    called `drained`. Communicators without one on a GPU are done without it.
    """

    def __init__(self, generation: Generation, suffix: str, members: tuple[int, ...]) -> None:
        self.generation = generation
        self.suffix = suffix
        self.members = members
        self.abort_flag = AbortFlag()
        self.done = False
        self.is_connected = False
        self._drained = threading.Event()
        self.communicator: Communicator | None = None
        self.error: Exception | None = None
        self.made: list[Communicator] = []  # parts of it, with connections of their own

    def abandon(self, reason: str) -> None:
        self.abort_flag.set(reason)
        if self.communicator is not None:
            self.communicator.abort(reason)

    def drained(self) -> None:
        """Notes that no kernel of a communicator runs on this worker's device, and none will before this one is
        entered."""
        self._drained.set()

    def await_drained(self) -> None:
        """Waits until `drained` is called. Raises CollectiveAborted when the building is abandoned first."""
        self.abort_flag.add_waiter(self._drained.set)
        self._drained.wait()  # until the member enters the generation, or abandons it
        self.abort_flag.remove_waiter(self._drained.set)
        self.abort_flag.check()

    def complete(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.made.clear()
        if self.abort_flag.is_set():  # after the line above: `abandon` saw it, or is seen here
            communicator.abort(self.abort_flag.reason or "aborted")

    def drop(self, error: Exception) -> None:
        """Gives up what is built: it will not be complete."""
        self.error = error
        for part in self.made:
            part.abort(str(error))
        self.made.clear()


class Rendezvous:
    def __init__(
        self,
        worker_id: str,
        bind_host: str,
        changed: threading.Condition,
        on_failure: Callable[[int, Exception], None],
        setting: str = AUTO,
        transports: Sequence[GpuTransport] = TRANSPORTS,
    ) -> None:
        """Serves this worker's meeting store. on_failure(generation, error): called from the builder's thread, unless
        the building was abandoned. setting: of BAGUA_TRANSPORT, checked."""
        allow_descriptors()
        self.lanes: frozenset[Lane] = frozenset()  # that every main communicator built from now on brings
        self.gpus: tuple[torch.device, ...] = ()  # that the script uses, as far as is known
        self._setting = setting
        self._transports = transports
        self._on_gpu: dict[int, OnGpu | None] = {}  # by generation; None for Gloo
        self._adopting = threading.Lock()
        self._said = ""
        self._on_failure = on_failure
        self._worker_id = worker_id
        self._bind_host = bind_host
        self._changed = changed
        self._server = MeetingServer(bind_host)

    @property
    def address(self) -> str:
        return joined(self._bind_host, self._server.port)

    def publish(self, values: Mapping[str, bytes]) -> None:
        """Puts values into this worker's own meeting store, where any member or later worker can read them."""
        self._server.publish({key.encode(): value for key, value in values.items()})

    def start(
        self, generation: Generation, members: tuple[int, ...] | None = None, suffix: str = ALL
    ) -> Building:
        """Begins to build among `members` (global ranks, ascending; default all). Wakes `changed` when done."""
        building = Building(generation, suffix, members or tuple(range(generation.world_size)))
        threading.Thread(
            target=self._build, args=(building,), name=f"bagua-build-{generation.number}", daemon=True
        ).start()
        return building

    # -- in the builder's thread

    def _build(self, building: Building) -> None:
        generation = building.generation
        store: MeetingStore | None = None
        try:
            own = generation.placement_of(self._worker_id)
            if own is None:
                raise ValueError(f"{self._worker_id} is not in generation {generation.number}")
            host, port = parted(generation.members[building.members[0]].store_address)
            store = MeetingStore(host, port, MEETING_TIMEOUT_S)
            building.abort_flag.add_waiter(store.interrupt)
            prefix = f"{generation.nonce}/{generation.number}/{building.suffix}"
            building.complete(self._connected(building, own.global_rank, store, prefix))
        except Exception as error:  # noqa: BLE001 (whatever the transport raises; the member reports it)
            given_up = building.abort_flag.is_set()
            building.drop(error)
            if not given_up and not isinstance(error, TransportRefused):
                self._on_failure(generation.number, error)
        finally:
            if store is not None:  # all addresses are known; a group that is built needs no store
                building.abort_flag.remove_waiter(store.interrupt)
                store.close()
        with self._changed:
            building.done = True
            self._changed.notify_all()

    def _connected(
        self, building: Building, global_rank: int, store: MeetingStore, prefix: str
    ) -> Communicator:
        own_store = PrefixStore(prefix, store)
        gpus = self.gpus
        if building.suffix == ALL:
            transport_agreement.tell(own_store, global_rank, statement(self._setting, gpus, self._transports))
        of_cpu = self._connect_cpu(
            building, building.members, global_rank, own_store, building.abort_flag, building.suffix
        )
        if building.suffix != ALL:
            on_gpu = self._on_gpu[building.generation.number]
            return self._with_gpus(
                building, building.members, global_rank, own_store, on_gpu, of_cpu, building.suffix
            )
        # By now all that connected have told theirs.
        choice = transport_agreement.agree(
            own_store, global_rank, building.generation.world_size, self._transports
        )
        on_gpu = self._adopt(building, global_rank, choice, gpus)
        nodes = lanes.nodes_of([m.agent_id for m in building.generation.members])
        begun = self._lanes(building, nodes, global_rank, PrefixStore(f"{prefix}/lanes", store))
        # Kernels of a replica's own collectives run until the boundary, also behind a loss.
        runs_others = building.generation.kind is GenerationKind.PLANNED or Lane.SHARD in begun
        if on_gpu is not None and runs_others:
            self._await_all_drained(building, of_cpu)
        main = self._with_gpus(building, building.members, global_rank, own_store, on_gpu, of_cpu, ALL)
        main.nodes, main.job_has_one_node = nodes, len(nodes) == 1
        made = {
            lane: self._with_gpus(building, members, global_rank, lane_store, on_gpu, lane_of_cpu, lane.value)
            for lane, (members, lane_store, lane_of_cpu) in begun.items()
        }
        shard = made.pop(Lane.SHARD, None)
        if shard is None:
            main.lanes = made
        else:  # algorithms act in it as in a generation of one worker a replica
            workers = begun[Lane.SHARD][0]
            shard.nodes, shard.job_has_one_node = lanes.among(nodes, workers), main.job_has_one_node
            shard.lanes = made
            main.lanes = {Lane.SHARD: shard}
        return main

    def _await_all_drained(self, building: Building, of_cpu: Communicator) -> None:
        """Waits until all members have drained their devices. Raises CollectiveFailed, CollectiveAborted. A member may
        take as long as it likes until it comes to the boundary, so no time-out of the meeting runs before all are
        there."""
        with self._changed:
            building.is_connected = True
            self._changed.notify_all()
        building.await_drained()
        of_cpu.barrier().wait()

    def _adopt(
        self, building: Building, global_rank: int, choice: Choice, gpus: tuple[torch.device, ...]
    ) -> OnGpu | None:
        """Returns what carries tensors of GPUs in this generation; None for Gloo. Raises TransportRefused."""
        if choice.is_refused:
            raise TransportRefused(choice.reason)
        if global_rank == 0 and (choice.transport or choice.is_notable) and choice.reason != self._said:
            self._said = choice.reason
            print(f"bagua: {choice.reason}", file=sys.stderr, flush=True)
        chosen = next((t for t in self._transports if t.name == choice.transport), None)
        on_gpu = None if chosen is None else OnGpu(chosen, gpus[0])
        with self._adopting:  # the builder of an older generation may still run
            self._on_gpu[building.generation.number] = on_gpu
            if len(self._on_gpu) > CHOICES_KEPT:
                del self._on_gpu[min(self._on_gpu)]
        return on_gpu

    def _lanes(
        self, building: Building, nodes: tuple[tuple[int, ...], ...], global_rank: int, store: PrefixStore
    ) -> dict[Lane, tuple[tuple[int, ...], PrefixStore, Communicator]]:
        """Connects each lane of this rank, and returns its members, its store and its part for the CPU."""
        built: dict[Lane, tuple[tuple[int, ...], PrefixStore, Communicator]] = {}
        workers = lanes.of_shard(building.generation.members, global_rank)
        wanted = self.lanes if workers is None else self.lanes | {Lane.SHARD}
        settings = building.generation.settings
        # any of its members may need them, so all of them connect them
        wanted |= lanes_for(settings.hierarchical is True or bool(settings.algorithm))
        for lane in sorted(wanted, key=lambda lane: lane.value):
            members = workers if lane is Lane.SHARD else lanes.members_of(lane, nodes, global_rank, workers)
            if members is not None:
                own_store = PrefixStore(f"{lane.value}/{members[0]}", store)
                # a flag of its own: an algorithm may abort its lane, and the generation goes on
                flag = building.abort_flag.below()
                of_cpu = self._connect_cpu(building, members, global_rank, own_store, flag, lane.value)
                built[lane] = (members, own_store, of_cpu)
        return built

    def _connect_cpu(
        self,
        building: Building,
        members: tuple[int, ...],
        global_rank: int,
        store: PrefixStore,
        abort_flag: AbortFlag,
        name: str,
    ) -> Communicator:
        made = build_gloo(
            building.generation.number,
            members.index(global_rank),
            len(members),
            store,
            self._bind_host,
            OPERATION_TIMEOUT_S,
            abort_flag,
            CONNECT_TIMEOUT_S,
        )
        made.flight.is_of(name, members)
        building.made.append(made)
        return made

    def _with_gpus(
        self,
        building: Building,
        members: tuple[int, ...],
        global_rank: int,
        store: PrefixStore,
        on_gpu: OnGpu | None,
        of_cpu: Communicator,
        name: str,
    ) -> Communicator:
        if on_gpu is None:
            return ByDevice(of_cpu, Staged(of_cpu))
        of_gpu = on_gpu.transport.build(
            building.generation.number,
            members.index(global_rank),
            len(members),
            PrefixStore(on_gpu.transport.name, store),
            on_gpu.device,
            CONNECT_TIMEOUT_S,
            of_cpu.abort_flag,
        )
        if of_gpu.flight is not None:
            of_gpu.flight.is_of(name, members)
        building.made.append(of_gpu)
        return ByDevice(of_cpu, of_gpu)
