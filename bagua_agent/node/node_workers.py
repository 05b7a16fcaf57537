"""Runs the workers of this node: starts one for each slot, and its successor when it ends.

Owns worker ids, slots and their files; environment_of_workers.py makes their environment, worker_ends.py keeps how they
ended. restart_policy.py decides on successors. Imports neither gRPC nor protobuf, so that workers are started before
the agent has loaded them.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bagua_agent.base.background import Failed, background_thread
from bagua_agent.base.errors import InfrastructureLost, UserError
from bagua_agent.base.exec_limits import why_not_passed
from bagua_agent.config.job_config import JobConfig
from bagua_agent.node.environment_of_workers import EnvironmentOfWorkers
from bagua_agent.node.script.script_environment import why_a_fresh_interpreter
from bagua_agent.node.torchrun.file_timers import FileTimers
from bagua_agent.node.worker_ends import NodeWorker, WorkerEnds
from bagua_agent.workers.exits.exit_cause import ExitCause
from bagua_agent.workers.exits.exit_watch import ExitWatch
from bagua_agent.workers.exits.termination import end_groups, kill_group
from bagua_agent.workers.guardian import Guardian
from bagua_agent.workers.output.log_access import open_file
from bagua_agent.workers.output.log_layout import LogLayout, WorkerFiles, open_log_dir
from bagua_agent.workers.output.output_options import OutputOptions, Streams
from bagua_agent.workers.output.router import OutputRouter
from bagua_agent.workers.process.account import find_account
from bagua_agent.workers.process.process_status import held_in_kernel
from bagua_agent.workers.process.worker_process import WorkerProcess
from bagua_agent.workers.stacks import StackTarget
from bagua_agent.workers.start.numa_binding import processors_of_slot
from bagua_agent.workers.start.numa_topology import read_topology
from bagua_agent.workers.start.spawn import spawn_worker
from bagua_agent.workers.start.warm_fit import can_be_warm
from bagua_agent.workers.start.warm_parent import WarmParent
from bagua_agent.workers.start.worker_command import PREIMPORT
from bagua_agent.workers.start.worker_environment import TorchrunPlace
from bagua_agent.workers.store_host import StoreHost
from bagua_contract.addresses import joined
from bagua_contract.environment import PREFIX

if TYPE_CHECKING:
    from bagua_contract import membership_pb2 as pb

log = logging.getLogger(__name__)

# What the first optimizer or DistributedDataParallel of a script imports (0.7 s): once for all workers, and before
# there is any, so that a start after a change of membership does not wait for it.
TRAINING_IMPORTS = ("torch._dynamo",)
CLOSING_GRACE_S = 0.0
CLOSING_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class StartedFor:
    """A worker's part in a RESTART generation: its id there, and the place for torchrun's variables."""

    worker_id: str
    place: TorchrunPlace


class NodeWorkers:
    """Starts, tracks and ends the workers of this node.

    on_exit(worker_id, returncode): called from a thread of its own, once per worker. on_failed(what, failed): called
    when a thread that this node can't do without has ended, from that thread. on_spawning(worker_id), an attribute:
    called before the worker can do anything; on_not_spawned(worker_id): there will be none of that id.
    on_killed(worker_id), an attribute: SIGKILL was sent to it.
    """

    def __init__(
        self,
        config: JobConfig,
        agent_id: str,
        node_name: str,
        bind_host: str,
        runtime_directory: Path,
        on_exit: Callable[[str, int], None],
        on_failed: Callable[[str, Failed], object] = lambda what, failed: None,
        *,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Takes the job's configuration; no worker starts yet. environment: the workers' variables, but for those of
        their own; a job's own environment never becomes the agent's.

        bind_host: empty where it is found later, and set as an attribute before a worker is started.
        """
        self._config = config
        self._agent_id = agent_id
        self.bind_host = bind_host
        self._runtime_directory = runtime_directory
        self._account = find_account(config.run_as) if config.run_as is not None else None
        self._environment = EnvironmentOfWorkers(
            config, agent_id, runtime_directory, self._account, environment
        )
        self._layout = LogLayout(open_log_dir(config.log_dir), config.job_id, node_name, self._account)
        self._made_log_dir = config.log_dir is None
        options = OutputOptions.parse(
            redirects=config.redirects,
            tee=config.tee,
            local_ranks_filter=config.local_ranks_filter,
            duplicate_stdout_filters=config.duplicate_stdout_filters,
            duplicate_stderr_filters=config.duplicate_stderr_filters,
            role=config.role,
            prefix_template=config.log_line_prefix_template,
            labels=config.labels_output,
        )
        self._output_options = options
        self.output = OutputRouter(
            options,
            self._layout,
            several=options.shows_several(config.slots),
            max_log_bytes=config.max_log_mib << 20,
            on_failed=lambda failed: on_failed("reading the output of workers", failed),
        )
        self._guardian = Guardian()
        self._exit_watch = ExitWatch(
            lambda worker, code: on_exit(worker.worker_id, code),
            lambda failed: on_failed("watching workers for their end", failed),
        )
        self._workers: dict[str, NodeWorker] = {}
        self.on_spawning: Callable[[str], None] = lambda worker_id: None
        self.on_not_spawned: Callable[[str], None] = lambda worker_id: None
        self.on_killed: Callable[[str], None] = lambda worker_id: None
        self._gate_open = False
        self._ends = WorkerEnds()
        self._timers: FileTimers | None = None
        self._topology = read_topology(environment) if config.numa_binding else None
        self._warm: WarmParent | None = None
        self._warming: threading.Thread | None = None
        self._store_host: StoreHost | None = None
        self._meeting_port = 0

    def shows_errors_of(self, failure: pb.Failure) -> bool:
        """Tells whether this node's terminal has shown what the failed worker wrote to stderr."""
        if failure.agent_id != self._agent_id:
            return False
        return self._output_options.plan(failure.slot, Streams.ERR).terminal

    def error_file_of(self, failure: pb.Failure) -> Path | None:
        """Returns the path of the failed worker's error file; None if the worker ran on another node."""
        if failure.agent_id != self._agent_id:
            return None
        return self._layout.worker_files(failure.slot, failure.worker_id).error

    def start(self, at_once: bool = True) -> None:
        """Begins whatever takes long before workers can be started. Raises UserError.

        at_once: without a warm parent every slot's first worker is started here, held at the gate until `begin`.
        """
        environment = self._helper_environment()
        if reason := why_not_passed(
            self._config.command.words, environment, resource.getrlimit(resource.RLIMIT_STACK)[0]
        ):
            raise UserError(f"workers can't be started: {reason}")
        self._guardian.start()
        self._guardian.end_marked(f"{PREFIX}AGENT_ID={self._agent_id}")
        self._guardian.remove_directory(self._runtime_directory)
        if self._made_log_dir:
            self._guardian.prune_directory(self._layout.log_dir)
        if self._account is not None:
            self._account.admit(self._runtime_directory)
        self._exit_watch.start()
        self.output.start()
        timers = self._environment.timer_file
        if timers is not None:
            self._timers = FileTimers(timers, self._signal_process)
            self._timers.start()
        warm = can_be_warm(self._config.command, self._config.start_method)
        if warm and (reason := why_a_fresh_interpreter(self._config.command, Path.cwd())):
            log.info("each worker starts an interpreter of its own: %s", reason)
            warm = False
        if warm:
            self._warm = WarmParent(
                self._config.command,
                environment,
                preimport=(*PREIMPORT, *TRAINING_IMPORTS),
                account=self._account,
            )
            self._warm.start()
        elif at_once:
            for slot in range(self._config.slots):
                self.spawn(slot)

    def when_startable(self, then: Callable[[], object]) -> None:
        """Calls `then`, perhaps from another thread, once workers start without having to import anything first."""
        warm = self._warm
        if warm is None:
            then()
            return

        # if it died, or can't be asked, workers are started without it
        self._warming = background_thread("bagua-warming", warm.wait_ready, lambda _: then())
        self._warming.start()

    def admit_to(self, socket: Path) -> None:
        """Restricts connections to this socket to workers and root."""
        if self._account is not None:
            self._account.give_socket(socket)

    def guard_group(self, pgid: int) -> None:
        """Registers a process group that must not outlive the agent either."""
        self._guardian.register(pgid)

    def begin(self) -> list[int]:
        """Lets every slot's worker run its script. Returns the slots that have none yet, for `spawn`."""
        self._gate_open = True
        taken = {w.slot for w in self._workers.values()}
        for worker in self._workers.values():
            worker.process.open_gate()
        return [slot for slot in range(self._config.slots) if slot not in taken]

    def dismiss(self) -> None:
        """Ends the workers that wait at the gate, because they are not needed."""
        self._gate_open = True
        for worker in self._workers.values():
            worker.process.refuse_gate()

    @property
    def worker_ids(self) -> list[str]:
        return list(self._workers)

    def get(self, worker_id: str) -> NodeWorker | None:
        return self._workers.get(worker_id)

    def spawn(self, slot: int, started_for: StartedFor | None = None) -> str:
        """Starts a worker in the slot and returns its id. Nothing of it is left when this raises.

        Raises UserError if what the command or the options name can't be used, InfrastructureLost if the host has no
        process, memory, descriptor or disk left for it.
        """
        if started_for is None:
            worker_id, place = f"{self._agent_id}.{slot}.{secrets.token_hex(3)}", None
        else:
            worker_id, place = started_for.worker_id, started_for.place
            self._gate_open = True
        with ExitStack() as undo:
            self.on_spawning(worker_id)
            undo.callback(self.on_not_spawned, worker_id)
            try:
                process, files = self._start(worker_id, slot, place, undo)
            except OSError as error:
                raise InfrastructureLost(f"worker in slot {slot} can't be started: {error}") from error
            self._workers[worker_id] = NodeWorker(process, files, slot)
            undo.pop_all()
        if self._gate_open:
            process.open_gate()
        return worker_id

    def _start(
        self, worker_id: str, slot: int, place: TorchrunPlace | None, undo: ExitStack
    ) -> tuple[WorkerProcess, WorkerFiles]:
        """Makes the worker's files and starts its process. undo: gets the callbacks that discard the worker if a later
        step fails. Raises OSError too."""
        files = self._layout.make_worker_directory(slot, worker_id)
        if self._account is not None:  # which can make no file there
            os.close(open_file(files.error, self._account, new=True))
        config = self._config
        cpus = None
        if config.numa_binding and self._topology is not None:
            cpus = processors_of_slot(config.numa_binding, slot, config.slots, self._topology)
        process = spawn_worker(
            config.command.for_worker(slot),
            self._environment.of_worker(
                worker_id, slot, files.error, self.bind_host, place, self._ends.count
            ),
            worker_id=worker_id,
            slot=slot,
            stdout=self.output.inherited(slot, Streams.OUT),
            stderr=self.output.inherited(slot, Streams.ERR),
            inherit_stdin=True,  # as under torchrun
            cpus=cpus,
            warm=self._warm,
            account=self._account,
        )
        undo.callback(self._discard, process)
        self._guardian.register(process.pid)
        self._exit_watch.watch(process)  # of one that is discarded too: its id is in no table
        self.output.attach(process, slot if place is None else place.global_rank)
        return process, files

    def _discard(self, process: WorkerProcess) -> None:
        """Ends a process that never became a worker of this node."""
        kill_group(process)
        self._guardian.unregister(process.pid)
        for descriptor in (process.stdout_fd, process.stderr_fd):
            if descriptor is not None:
                os.close(descriptor)
        process.close()

    def _helper_environment(self) -> Mapping[str, str]:
        return self._environment.of_helper(self._layout.worker_files(0, "").error, self.bind_host)

    def ended(self, worker_id: str, returncode: int) -> tuple[NodeWorker, ExitCause]:
        """Removes an exited worker from the table and returns it with the cause of its end. What it left in its pipes
        is written first."""
        worker = self._workers.pop(worker_id)
        stderr_tail = self.output.finish(worker_id)
        self._guardian.unregister(worker.process.pid)
        cause = self._ends.add(worker, returncode, stderr_tail)
        worker.process.close()
        return worker, cause

    def an_exit_is_on_its_way(self) -> bool:
        """Tells whether a worker has ended whose exit is not handled yet."""
        return any(w.process.has_ended() for w in self._workers.values())

    def early_crashes(self, slot: int) -> int:
        return self._ends.early_crashes(slot)

    def signal_all(self, number: signal.Signals) -> None:
        """Sends the signal to every worker's whole process group; returns at once."""
        for worker in self._workers.values():
            worker.asked_to_end = True
            worker.process.refuse_gate()
            worker.process.signal_group(number)
            if number == signal.SIGKILL:
                self.on_killed(worker.worker_id)

    def ask_all_to_end(self, number: signal.Signals) -> None:
        """Sends the signal to every worker's whole process group, unless the worker was asked to end before."""
        for worker in self._workers.values():
            worker.asked_to_end = True
            worker.process.refuse_gate()
            worker.process.ask_to_end(number)

    def _signal_process(self, pid: int, number: int) -> bool:
        """Sends a signal to a process that belongs to a worker here, and tells whether it did: each worker leads a
        session. May be called from any thread."""
        try:
            if not any(w.process.pid == os.getsid(pid) for w in list(self._workers.values())):
                return False
            os.kill(pid, number)
        except (OSError, OverflowError):
            return False  # it has ended, or is none of ours, or no number of a process
        return True

    def kill(self, worker_id: str, why: str) -> None:
        """Sends SIGKILL to one worker's group; its exit cause will give `why`."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._ends.will_be_killed(worker_id, why)
            worker.process.signal_group(signal.SIGKILL)
            self.on_killed(worker_id)

    def stack_target_of(self, slot: int) -> StackTarget | None:
        """Returns the stack target of the slot's worker; None if the slot has none. May be called from any thread."""
        for w in list(self._workers.values()):
            if w.slot == slot:
                return self._stack_target(w)
        return None

    def stack_targets(self) -> list[StackTarget]:
        return [self._stack_target(w) for w in self._workers.values()]

    def _stack_target(self, w: NodeWorker) -> StackTarget:
        return StackTarget(
            w.worker_id, w.process.pid, w.files.directory, w.process.stack_channel, self._account
        )

    def open_meeting(self) -> str:
        """Opens a new store for one RESTART generation, closes the one before, and returns its host:port. Bounded.

        Call it from threads that live as long as the agent. Raises InfrastructureLost.
        """
        if self._store_host is None:
            self._store_host = StoreHost(self._helper_environment(), warm=self._warm, account=self._account)
        if self._meeting_port:
            self._store_host.drop(self._meeting_port)
        self._meeting_port = self._store_host.open(self.bind_host, self._config.master_port or 0)
        if self._store_host.pid is not None:
            self._guardian.register(self._store_host.pid)
        return joined(self.bind_host, self._meeting_port)

    def end_all(self, grace_s: float, is_hurried: Callable[[], bool] = lambda: False) -> bool:
        """Sends SIGTERM, after grace_s or once is_hurried() SIGKILL, to every worker's whole group; bounded. What is
        left then is reported. See end_groups."""
        processes = [w.process for w in self._workers.values()]
        for process in processes:
            process.refuse_gate()
        have_ended = end_groups(processes, grace_s, is_hurried)
        if not have_ended:
            left = [held_in_kernel(p.pid) for p in processes if not p.has_ended()]
            said = "; ".join(left) or "processes that they started"
            log.warning(
                "workers are left behind, which SIGKILL does not end: %s; a driver or a file system does not answer, "
                "and this host may need a reboot",
                said,
            )
        return have_ended

    def start_no_more(self) -> None:
        """Ends the warm parent while the caller does other things before `close`."""
        if self._warm is not None:
            self._warm.begin_stop()

    def close(self) -> None:
        """Ends and removes everything of the workers; nothing of them is left when it returns."""
        self.end_all(CLOSING_GRACE_S)
        self._exit_watch.stop()
        for worker in self._workers.values():
            self.output.finish(worker.worker_id)
            worker.process.close()
        self._workers.clear()
        if self._timers is not None:
            self._timers.stop()
        if self._store_host is not None:
            self._store_host.stop()
        if self._warm is not None:
            self._warm.stop()
        if self._warming is not None:
            self._warming.join(CLOSING_TIMEOUT_S)
        self.output.stop()
        self._guardian.stop()
        if self._made_log_dir:
            _remove_empty(self._layout.log_dir)


def _remove_empty(directory: Path) -> None:
    """Removes a temporary log directory as far as nothing was written into it."""
    for path, _, _ in os.walk(directory, topdown=False):
        try:
            os.rmdir(path)
        except OSError:
            continue  # something is in it: an error file, a log
