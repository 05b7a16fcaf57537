"""Runs one node's part of a job: starts its workers, joins the job, and follows it to its end.

`run_job` starts the workers before it loads the slow modules; the loop is loop.py.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path

from bagua_agent.base.errors import BaguaError, JobIsOver, JobReplaced, UserError
from bagua_agent.base.imports import uncollected
from bagua_agent.base.messages import HelperFailed, SignalCame, WorkerExited
from bagua_agent.base.plain_logging import log_through, log_to_stderr
from bagua_agent.base.plain_text import plain_lines
from bagua_agent.base.quiet_grpc import wait_without_polling
from bagua_agent.base.signals import SignalsToInbox
from bagua_agent.config.job_config import JobConfig, launcher_variables, workers_of_a_replica
from bagua_agent.node.environment_of_workers import NO_GRPC_FORK_HANDLERS
from bagua_agent.node.local_address import UnknownStoreName
from bagua_agent.node.node_address import node_address
from bagua_agent.node.node_name import hold_name
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.runtime_directory import make_runtime_directory, own, remove_left
from bagua_agent.node.script.script_mode import Mode, guess_mode, makes_torch_group, options_of_steps
from bagua_agent.node.torchrun.health_server import health_port, health_server
from bagua_agent.node.torchrun.launcher_error_file import write_own_error

MOST_RETURNS = 3  # as a newcomer, to a job that went on without this node


def run_job(
    config: JobConfig,
    on_error: Callable[[str], None] = lambda reason: None,
    environment: Mapping[str, str] = os.environ,
    on_metrics: Callable[[str], None] = lambda address: None,
) -> int:
    """Runs this node's part of the job; returns the exit code. Errors are printed, one line each.

    on_error: gets the error that ended it. environment: of the workers, but for the variables of their own. on_metrics:
    gets HOST:PORT at which this agent serves metrics, if it does; HOST is empty for every address.
    """
    log_to_stderr(logging.WARNING, "bagua-launch: ")
    try:
        for _ in range(MOST_RETURNS):
            try:
                return _run(config, environment, on_metrics)
            except JobReplaced as replaced:
                print(plain_lines(f"bagua-launch: {replaced}; joining again"), file=sys.stderr, flush=True)
        return _run(config, environment, on_metrics)
    except JobIsOver as over:
        print(plain_lines(f"bagua-launch: {over}"), file=sys.stderr, flush=True)
        return over.result_code
    except BaguaError as error:
        print(plain_lines(f"bagua-launch: {error}"), file=sys.stderr, flush=True)
        on_error(str(error))
        write_own_error(launcher_variables(config, os.environ), error)
        return error.exit_code
    except Exception as error:
        write_own_error(launcher_variables(config, os.environ), error)
        raise


def _run(config: JobConfig, environment: Mapping[str, str], on_metrics: Callable[[str], None]) -> int:
    for name, value in NO_GRPC_FORK_HANDLERS.items():
        os.environ.setdefault(name, value)  # before gRPC is loaded
    node_name, holder = config.node_name, None
    if node_name is None:
        node_name, holder = hold_name(socket.gethostname().split(".")[0] or "node", config.job_id)
    with holder or nullcontext():
        return _run_as(node_name, config, environment, on_metrics)


def _run_as(
    node_name: str, config: JobConfig, environment: Mapping[str, str], on_metrics: Callable[[str], None]
) -> int:
    agent_id = f"{_key_part(node_name)}-{secrets.token_hex(3)}"
    try:
        address = node_address(config)
    except UnknownStoreName:
        address = ""  # JobLoop waits for the store, and asks again
    port = health_port(launcher_variables(config, os.environ))
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    tell = SignalsToInbox(config.signals_to_handle, lambda number: inbox.put(SignalCame(number)))
    directory = make_runtime_directory(config.run_as)
    in_use = own(directory)
    remove_left(directory.parent)
    workers = NodeWorkers(
        config,
        agent_id,
        node_name,
        address,
        directory,
        lambda worker_id, code: inbox.put(WorkerExited(worker_id, code)),
        lambda what, failed: inbox.put(HelperFailed(what, failed.reason)),
        environment=environment,
    )
    with tell as signals, ExitStack() as helpers:
        # Within: a further signal must not end the process before it has put all away.
        helpers.callback(in_use.close)
        helpers.callback(shutil.rmtree, directory, ignore_errors=True)
        # The loop and the thread that reads workers' output log too, until `close` has ended that thread. A terminal
        # that pauses must not hold them.
        helpers.enter_context(log_through(workers.output.say_if_open))
        helpers.callback(workers.close)
        if port is not None:
            health = health_server(port, inbox.put)
            helpers.callback(health.stop)
            health.start()
        guess = guess_mode(config.command, Path.cwd())
        # a job with replicas is live
        replica_size = workers_of_a_replica(config)
        is_for_torchrun = replica_size > 1 and guess.mode is Mode.RESTART
        if is_for_torchrun and makes_torch_group(config.command, Path.cwd()):
            raise UserError(
                f"--replica-size {replica_size}: {guess.reason}, and makes torch's default process group itself, "
                "as scripts of torchrun do; such a script is started again after each change and forms no "
                "replicas. Leave --replica-size out, or call bagua_core.init_process_group(), which makes torch's "
                "group for the replica"
            )
        mode = Mode.LIVE if replica_size > 1 else guess.mode
        if mode is not guess.mode:  # only a guess: it may be called by a module that the script imports
            workers.output.say(
                f"bagua-launch: {guess.reason}; unless its workers call it, they form no replicas and "
                f"--replica-size {replica_size} changes nothing"
            )
        if mode is Mode.RESTART and not guess.names_bagua and (unused := options_of_steps(config)):
            workers.output.say(
                f"bagua-launch: note: {guess.reason}; unless a module that it imports does, "
                f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect"
            )
        if config.virtual_shards and mode is Mode.RESTART:
            raise UserError(
                f"a deterministic job's script calls bagua_core.init_process_group, but {guess.reason}; scripts "
                "that are restarted after a change do not have virtual shards. Leave --deterministic out for them"
            )
        workers.start(at_once=mode is Mode.LIVE and bool(address))
        _load_loop()  # only now, beside the workers' own imports
        from bagua_agent.job.loop import JobLoop
        from bagua_agent.job.watching import open_dashboard, open_metrics, open_otel

        open_metrics(config, inbox.put, workers.output.say, on_metrics, helpers)
        watching = None
        if config.dashboard is not None:
            watching = open_dashboard(config, node_name, inbox.put, workers.output.say)
            helpers.callback(watching.stop)
        sent = open_otel(config, node_name, inbox.put, workers.output.say, helpers)
        loop = JobLoop(
            config,
            agent_id,
            node_name,
            address,
            directory,
            workers,
            inbox,
            signals,
            mode,
            watching,
            sent.event,
            sent.last,
        )
        try:
            return loop.run()
        except JobReplaced as replaced:
            if signals.first is None:
                raise
            workers.output.say(
                f"bagua-launch: {replaced}; this node was asked to leave, and does not join again"
            )
            return 128 + signals.first
        finally:
            try:
                workers.start_no_more()
            finally:
                loop.close()


@cache
def _load_loop() -> None:
    """Loads gRPC, etcd3 and the loop, which takes a fifth of a second. Once: nothing of a job may escape collection."""
    with uncollected():
        import bagua_agent.job.loop
        import bagua_agent.job.watching  # noqa: F401
    wait_without_polling()


def _key_part(node_name: str) -> str:
    """Returns a host name as a part of ids and keys."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in node_name)[:40] or "node"
