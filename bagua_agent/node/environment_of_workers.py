"""The environment variables of this node's workers, and of the processes that help them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bagua_agent.config.job_config import (
    STATIC_MASTER_PORT,
    JobConfig,
    launcher_variables,
    workers_of_a_replica,
)
from bagua_agent.node.runtime_directory import session_socket
from bagua_agent.node.torchrun.file_timers import FILE_VARIABLE, timer_file
from bagua_agent.workers.process.account import Account
from bagua_agent.workers.start.worker_environment import TorchrunPlace, torchrun_variables
from bagua_contract import checkpoint_dir
from bagua_contract.environment import PREFIX, WorkerEnvironment

# gRPC's fork handlers are of no use to an agent, which forks only to execute at once, and complain on its terminal.
# DataLoader processes are forked from a worker whose session is open. They never use gRPC, and its own fork handlers
# are what can hang or crash such a fork (grpc issue 32992); a script that needs them sets the variable itself.
NO_GRPC_FORK_HANDLERS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}

# Of a deterministic job, unless the user sets them. Libraries read these when they are loaded or first used: threads,
# by
# which sums on the CPU are cut; cuBLAS's and MKL's reproducible modes; the order of Python's sets of strings.
DETERMINISTIC = {
    "OMP_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "MKL_CBWR": "AUTO",
    "PYTHONHASHSEED": "0",
}


@dataclass(frozen=True, slots=True)
class EnvironmentOfWorkers:
    """Makes the environment of each worker of this node and of their helper processes. base: the variables that are not
    the workers' own."""

    config: JobConfig
    agent_id: str
    runtime_directory: Path
    account: Account | None
    base: Mapping[str, str]

    @property
    def timer_file(self) -> Path | None:
        """The path of the pipe by which torchrun's timers in a script send requests to the agent; None if timers are
        off."""
        return timer_file(launcher_variables(self.config, self.base), self.runtime_directory)

    def of_worker(
        self,
        worker_id: str,
        slot: int,
        error_file: Path,
        bind_host: str,
        place: TorchrunPlace | None,
        restarts: int,
    ) -> Mapping[str, str]:
        """Returns the whole environment of one worker. place: None before a generation is formed. restarts: the
        restarts of workers on this node so far."""
        config = self.config
        # What torchrun's variables can say before a generation is formed: this node alone. The core
        # knows the ranks in force; see bagua_core.get_rank().
        place = place or TorchrunPlace(
            local_rank=slot,
            global_rank=slot,
            node_rank=config.node_rank or 0,
            local_world_size=config.slots,
            world_size=config.slots,
            node_count=1,
            master_addr=config.master_addr or bind_host,
            master_port=config.master_port or STATIC_MASTER_PORT,
            run_id=config.job_id,
            restart_count=restarts,
            max_restarts=config.max_restarts,
        )
        place = replace(place, role=config.role, error_file=str(error_file))
        own = WorkerEnvironment(
            job_id=config.job_id,
            worker_id=worker_id,
            agent_id=self.agent_id,
            session_socket=str(session_socket(self.runtime_directory)),
            bind_host=bind_host,
            slot=slot,
            slots=config.slots,
            ledger_dir=str(Path(config.ledger_dir).absolute()) if config.ledger_dir else "",
            failpoints=config.failpoints,
            digest_every_steps=config.digest_every_steps,
            checkpoint_dir=checkpoint_dir.complete(config.checkpoint_dir) if config.checkpoint_dir else "",
            checkpoint_every=config.checkpoint_every,
            error_file=str(error_file),
            virtual_local_rank=int(config.virtual_local_rank),
            replica_size=workers_of_a_replica(config),
            virtual_shards=config.virtual_shards,
        )
        torchrun = torchrun_variables(place, self.base, virtual_local_rank=config.virtual_local_rank)
        torchrun["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(config.signals_to_handle)
        if (timers := self.timer_file) is not None:
            torchrun[FILE_VARIABLE] = str(timers)
        whose = {} if self.account is None else self.account.environment
        fixed = DETERMINISTIC if config.virtual_shards else {}
        return {**NO_GRPC_FORK_HANDLERS, **fixed, **self.base, **whose, **torchrun, **own.encode()}

    def of_helper(self, error_file: Path, bind_host: str) -> Mapping[str, str]:
        """Returns a worker's environment without the variables that make a process a worker."""
        env = dict(self.of_worker("", 0, error_file, bind_host, None, 0))
        del env[PREFIX + "WORKER_ID"]
        return env
