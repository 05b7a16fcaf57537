"""Which workers run on this node? Starts one for each slot, and its successor when it ends.

Owns worker ids, slots, their files and their environment. When to respawn is restart_policy.py, what an exit means
exit_cause.py. Imports no gRPC, so that workers are started before the agent has loaded it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.job_config import JobConfig
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.restart_policy import respawn_delay_s
from bagua_agent.workers.exit_cause import ExitCause, exit_cause
from bagua_agent.workers.exit_watch import ExitWatch
from bagua_agent.workers.guardian import Guardian
from bagua_agent.workers.log_layout import LogLayout, WorkerFiles, open_log_dir
from bagua_agent.workers.output import OutputRouter
from bagua_agent.workers.output_options import OutputOptions
from bagua_agent.workers.spawn import spawn_worker
from bagua_agent.workers.termination import end_groups
from bagua_agent.workers.worker_environment import TorchrunPlace, torchrun_variables
from bagua_agent.workers.worker_process import WorkerProcess
from bagua_contract.environment import WorkerEnvironment

CLOSING_GRACE_S = 0.0

# DataLoader processes are forked from a worker whose session is open. They never use gRPC, and its own fork handlers
# are what can hang or crash such a fork (grpc issue 32992); a script that needs them sets the variable itself.
NO_GRPC_FORK_HANDLERS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}


@dataclass(slots=True)
class NodeWorker:
    """One started worker. was_ready: it reached its first step boundary."""

    process: WorkerProcess
    files: WorkerFiles
    slot: int
    was_ready: bool = False

    @property
    def worker_id(self) -> str:
        return self.process.worker_id


class NodeWorkers:
    """on_exit(worker_id, returncode): from a thread of its own, once per worker."""

    def __init__(
        self,
        config: JobConfig,
        agent_id: str,
        node_name: str,
        bind_host: str,
        session_socket: str,
        on_exit: Callable[[str, int], None],
    ) -> None:
        self._config = config
        self._agent_id = agent_id
        self._bind_host = bind_host
        self._session_socket = session_socket
        self._layout = LogLayout(open_log_dir(config.log_dir), config.job_id, node_name)
        self._made_log_dir = config.log_dir is None
        options = OutputOptions.parse(
            redirects=config.redirects,
            tee=config.tee,
            local_ranks_filter=config.local_ranks_filter,
            duplicate_stdout_filters=config.duplicate_stdout_filters,
            duplicate_stderr_filters=config.duplicate_stderr_filters,
        )
        self.output = OutputRouter(
            options, self._layout, prefixed=options.needs_prefix(config.slots, config.max_nodes)
        )
        self._guardian = Guardian()
        self._exit_watch = ExitWatch(lambda worker, code: on_exit(worker.worker_id, code))
        self._workers: dict[str, NodeWorker] = {}
        self._gate_open = False
        self._early_crashes: dict[int, int] = {}
        self._restarts = 0
        self._policy = Policy()

    def start(self) -> None:
        """Every slot's first worker, held at the gate until `open_gates`. Raises UserError."""
        self._guardian.start()
        self._exit_watch.start()
        self.output.start()
        for slot in range(self._config.slots):
            self.spawn(slot)

    def open_gates(self) -> None:
        self._gate_open = True
        for worker in self._workers.values():
            worker.process.open_gate()

    @property
    def worker_ids(self) -> list[str]:
        return list(self._workers)

    def get(self, worker_id: str) -> NodeWorker | None:
        return self._workers.get(worker_id)

    def spawn(self, slot: int) -> str:
        """The id of the slot's new worker."""
        worker_id = f"{self._agent_id}.{slot}.{secrets.token_hex(3)}"
        files = self._layout.make_worker_directory(slot, worker_id)
        process = spawn_worker(
            self._config.command,
            self._environment(worker_id, slot, files),
            worker_id=worker_id,
            slot=slot,
            inherit_stdin=self._config.slots == 1 and self._config.max_nodes == 1,
        )
        self._guardian.register(process.pid)
        self.output.attach(process)
        self._workers[worker_id] = NodeWorker(process, files, slot)
        self._exit_watch.watch(process)
        if self._gate_open:
            process.open_gate()
        return worker_id

    def _environment(self, worker_id: str, slot: int, files: WorkerFiles) -> Mapping[str, str]:
        config = self._config
        # What torchrun's variables can say before a generation is formed: this node alone. The core
        # knows the ranks in force; see bagua_core.get_rank().
        place = TorchrunPlace(
            local_rank=slot,
            global_rank=slot,
            node_rank=config.node_rank or 0,
            local_world_size=config.slots,
            world_size=config.slots,
            node_count=1,
            master_addr=config.master_addr or self._bind_host,
            master_port=config.master_port or 29500,
            run_id=config.job_id,
            restart_count=self._restarts,
            max_restarts=config.max_restarts,
            role=config.role,
            error_file=str(files.error),
        )
        own = WorkerEnvironment(
            job_id=config.job_id,
            worker_id=worker_id,
            agent_id=self._agent_id,
            session_socket=self._session_socket,
            bind_host=self._bind_host,
            slot=slot,
            slots=config.slots,
            ledger_dir=str(Path(config.ledger_dir).absolute()) if config.ledger_dir else "",
            failpoints=config.failpoints,
            digest_every_steps=config.digest_every_steps,
            error_file=str(files.error),
        )
        torchrun = torchrun_variables(place, os.environ, virtual_local_rank=config.virtual_local_rank)
        return {**NO_GRPC_FORK_HANDLERS, **os.environ, **torchrun, **own.encode()}

    def ended(self, worker_id: str, returncode: int) -> tuple[NodeWorker, ExitCause]:
        """Take an exited worker off the books; what it left in its pipes is written first."""
        worker = self._workers.pop(worker_id)
        stderr_tail = self.output.finish(worker_id)
        self._guardian.unregister(worker.process.pid)
        try:
            error_text: str | None = worker.files.error.read_text(errors="replace")
        except OSError:
            error_text = None  # most workers leave none
        worker.process.close()
        if worker.was_ready:
            self._early_crashes[worker.slot] = 0
        else:
            self._early_crashes[worker.slot] = self._early_crashes.get(worker.slot, 0) + 1
        self._restarts += 1
        return worker, exit_cause(returncode, error_text, stderr_tail)

    def an_exit_is_on_its_way(self) -> bool:
        """Whether a worker is over whose exit has not been taken off the books yet."""
        return any(w.process.has_ended() for w in self._workers.values())

    def respawn_delay_s(self, slot: int) -> float:
        return respawn_delay_s(self._early_crashes.get(slot, 0), self._policy)

    def end_all(self, grace_s: float) -> bool:
        """SIGTERM, after grace_s SIGKILL, to every worker's whole group; bounded."""
        for worker in self._workers.values():
            worker.process.refuse_gate()
        return end_groups([w.process for w in self._workers.values()], grace_s)

    def close(self) -> None:
        """Nothing of the workers is left when it returns."""
        self.end_all(CLOSING_GRACE_S)
        self._exit_watch.stop()
        for worker in self._workers.values():
            self.output.finish(worker.worker_id)
            worker.process.close()
        self._workers.clear()
        self.output.stop()
        self._guardian.stop()
        if self._made_log_dir:
            _remove_empty(self._layout.log_dir)


def _remove_empty(directory: Path) -> None:
    """Remove a temporary log directory as far as nothing was written into it."""
    for path, _, _ in os.walk(directory, topdown=False):
        try:
            os.rmdir(path)
        except OSError:
            continue  # something is in it: an error file, a log
