"""The commands that talk to a cluster: submit, status, logs, drain, stop, delete and others. Thin: ask, then print."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from bagua_agent.base.errors import UserError
from bagua_agent.base.plain_text import plain_line
from bagua_agent.config.job_config import StoreCredentials
from bagua_launch.cluster_options import CLUSTER_OPTIONS, FILE_OPTIONS, SUBMIT_OPTIONS
from bagua_launch.command_line import CONTEXT, GroupedCommand, note, parameters, program_argument
from bagua_launch.config_file import read_config_file
from bagua_launch.errors import RequestError
from bagua_launch.input_files import check_command, check_credentials, check_passed
from bagua_launch.job_request import parse_credentials
from bagua_launch.options import Option
from bagua_launch.precedence import Values, merge
from bagua_launch.rendezvous_request import parse_endpoints
from bagua_launch.tables import table

if TYPE_CHECKING:
    from bagua_agent.etcd.client import Store
    from bagua_agent.history.job_history import JobEvent

CONNECT_TIMEOUT_S = 5.0


def _values(options: Sequence[Option], typed: dict[str, Any]) -> Values:
    return merge(options, typed, os.environ, read_config_file(os.environ, FILE_OPTIONS))


@contextmanager
def _store(values: Values) -> Iterator[Store]:
    if "etcd" not in values:
        raise RequestError("--etcd is missing; use --etcd HOST:PORT, or set BAGUA_ETCD")
    endpoints = parse_endpoints(values["etcd"])
    credentials: StoreCredentials = parse_credentials({**values, "rdzv_endpoint": values["etcd"]})
    check_credentials(credentials)

    from bagua_agent.config.etcd_credentials import store_config
    from bagua_agent.etcd.client import Store

    store = Store(store_config(endpoints, credentials))
    try:
        store.connect(CONNECT_TIMEOUT_S)
        yield store
    finally:
        store.close()


def submit(**typed: Any) -> int:
    program, as_json = typed.pop("program"), typed.pop("json")
    values = _values(SUBMIT_OPTIONS, typed)
    from bagua_launch.cluster_request import parse_submission

    submission = parse_submission(
        values,
        program,
        directory=os.getcwd(),
        environ=os.environ,
        submitter=f"{getpass.getuser()}@{socket.gethostname()}",
        now_unix_s=time.time(),
    )
    from bagua_launch.job_request import parse_command

    command = parse_command(values, program)
    check_command(command)
    check_passed(command, submission.environment)
    with _store(values) as store:
        from bagua_agent.cluster_client import cluster_requests

        cluster_requests.submit(store, submission)
        _say(as_json, submission.job_id, {"job": submission.job_id})
        if "follow" not in values:
            return 0
        return _follow(store, submission.job_id, as_json)


def _say(as_json: bool, text: str, record: dict[str, Any]) -> None:
    """One line: the sentence, or the record for programs."""
    click.echo(json.dumps(record) if as_json else plain_line(text))


def _follow(store: Store, job_id: str, as_json: bool) -> int:
    from bagua_agent.cluster_client.job_story import follow

    try:
        ended = follow(
            store,
            job_id,
            lambda event: _say_event(as_json, event),
            lambda text: _say(as_json, f"queued: {text}", {"queued": text}),
        )
    except KeyboardInterrupt:
        click.echo(f"\njob {job_id} goes on; `bagua-launch stop {job_id}` ends it", err=True)
        return 130
    end = {"outcome": str(ended.outcome), "reason": ended.reason, "exit_code": ended.exit_code}
    _say(as_json, f"{ended.outcome}: {ended.reason}", end)
    return ended.exit_code


def _time_of_day(time_unix_s: float) -> str:
    """Of a record that others wrote: it may hold a time that no calendar has."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(time_unix_s))
    except (OverflowError, ValueError, OSError):
        return "--:--:--"


def _say_event(as_json: bool, event: JobEvent) -> None:
    at = _time_of_day(event.time_unix_s)
    record = {
        "time_unix_s": event.time_unix_s,
        "node": event.node_name,
        "kind": event.kind.name.lower(),
        "text": event.text,
    }
    _say(as_json, f"{at} {event.node_name or '-'}: {event.text}", record)


def status(**typed: Any) -> int:
    """One job with everything, or a table of all."""
    job_id, as_json = typed.pop("job"), typed.pop("json")
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        from bagua_agent.cluster_client.cluster_requests import unknown_job
        from bagua_agent.cluster_client.cluster_status import cluster_status
        from bagua_agent.cluster_client.started_jobs import started_job, started_jobs

        submitted = cluster_status(store, complain=note).jobs
        jobs = [j for j in submitted if job_id in (None, j.job_id)]
        if job_id is None:
            jobs += started_jobs(store, {j.job_id for j in submitted})
        elif not jobs and (by_hand := started_job(store, job_id)) is not None:
            jobs = [by_hand]
        if job_id is not None and not jobs:
            raise unknown_job(store, job_id)
    if as_json:
        click.echo(json.dumps([asdict(job) for job in jobs], indent=1))
        return 0
    rows = [
        (j.job_id, j.state, f"{j.min_nodes}:{j.max_nodes}", str(len(j.nodes)), str(j.priority), j.reason)
        for j in jobs
    ]
    click.echo(table(("JOB", "STATE", "ASKED", "NODES", "PRIORITY", "WHY"), rows, "no job in this etcd"))
    for job in jobs if job_id is not None else ():
        click.echo(f"\nnodes: {', '.join(job.nodes) or 'none'}")
        by = "started by hand" if job.by_hand else f"submitted by {job.submitter or 'an unknown user'}"
        click.echo(plain_line(by))
    return 0


def nodes(**typed: Any) -> int:
    as_json = typed.pop("json")
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        from bagua_agent.cluster_client.cluster_status import cluster_status

        found = cluster_status(store, complain=note)
    if as_json:
        click.echo(json.dumps([asdict(node) for node in found.nodes], indent=1))
        return 0
    rows = [
        (
            n.node_name,
            n.state,
            f"{n.taken}/{n.slots}",
            ", ".join(f"{job_id} ({state})" for job_id, _, state in n.jobs),
            n.reason,
        )
        for n in found.nodes
    ]
    click.echo(table(("NODE", "STATE", "SLOTS", "JOBS", "WHY"), rows, "no daemon runs anywhere"))
    if not found.scheduler:
        click.echo("no daemon schedules at the moment", err=True)
    return 0


def events(**typed: Any) -> int:
    job_id, as_json, goes_on = typed.pop("job"), typed.pop("json"), typed.pop("follow")
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        if goes_on:
            return _follow(store, job_id, as_json)
        from bagua_agent.cluster_client.cluster_requests import unknown_job
        from bagua_agent.etcd import cluster_keys
        from bagua_agent.etcd.keys import JobKeys
        from bagua_agent.history.job_history import events_of

        keys = JobKeys(job_id)
        records, _ = store.get_prefix(keys.events)
        if not records and store.get(cluster_keys.submission(job_id)) is None:
            raise unknown_job(store, job_id)
        for event in events_of(records, keys):
            _say_event(as_json, event)
    return 0


def logs(**typed: Any) -> int:
    job_id, rank, goes_on, stream, last, as_json = (
        typed.pop(n) for n in ("job", "rank", "follow", "stream", "last_bytes", "json")
    )
    values = _values(CLUSTER_OPTIONS, typed)
    streams = ("out", "err") if stream == "both" else (stream,)
    with _store(values) as store:
        from bagua_agent.cluster_client.cluster_requests import outcome_of
        from bagua_agent.cluster_client.log_reader import LogReader, WorkerOutput, is_followed, last_workers
        from bagua_agent.cluster_client.started_jobs import is_submitted, no_logs, started_job

        if not is_submitted(store, job_id) and (by_hand := started_job(store, job_id)) is not None:
            raise no_logs(by_hand)
        reader = LogReader(store, job_id, _daemon_credentials(values))

        def is_wanted(output: WorkerOutput) -> bool:
            return output.global_rank == rank if rank is not None else output.global_rank is not None

        def tell(output: WorkerOutput, line: str) -> None:
            record = {"node": output.node_name, "rank": output.global_rank, "line": line}
            _say(as_json, line if rank is not None else f"[{output.label}] {line}", record)

        def complain(text: str) -> None:
            if text not in told:
                told.add(text)
                note(text)

        told: set[str] = set()
        try:
            if goes_on:
                present = reader.outputs(complain)
                earlier = {(o.node_name, o.directory) for o in present if o.global_rank is None}
                reader.follow(lambda o: is_followed(o, rank, earlier), streams, tell, complain)
                return 0
            has_ended = outcome_of(store, job_id) is not None
            present = reader.outputs(complain)
            all_ended = has_ended and rank is None
            outputs = last_workers(present) if all_ended else [o for o in present if is_wanted(o)]
            if not outputs:
                which = "no worker" if rank is None else f"no rank {rank}"
                told_of = f"see status {job_id}"
                if has_ended and present:
                    told_of = f"`bagua-launch logs {job_id}` shows workers that had left before the job ended"
                raise UserError(f"job {job_id!r} has {which} with output on a node that answers; {told_of}")
            for output in outputs:
                for name in streams:
                    for line in reader.lines(output, name, last, complain):
                        tell(output, line)
        except KeyboardInterrupt:
            return 130
        finally:
            reader.close()
    return 0


def _daemon_credentials(values: Values) -> Any:
    """For calls to daemons: the certificates that etcd is shown. None: without TLS."""
    credentials = parse_credentials({**values, "rdzv_endpoint": values["etcd"]})
    if credentials.ca_file is None or credentials.cert_file is None or credentials.key_file is None:
        return None
    from bagua_agent.security.certificate_files import TlsFiles, utc_now
    from bagua_agent.security.grpc_security import channel_credentials

    return channel_credentials(
        TlsFiles(credentials.ca_file, credentials.cert_file, credentials.key_file), utc_now()
    )


def stop(**typed: Any) -> int:
    job_id, as_json = typed.pop("job"), typed.pop("json")
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        from bagua_agent.cluster_client import cluster_requests
        from bagua_agent.cluster_client.started_jobs import is_submitted, request_stop

        submitted = is_submitted(store, job_id)
        done = cluster_requests.stop(store, job_id) if submitted else request_stop(store, job_id)
    _say(as_json, done, {"job": job_id, "done": done})
    return 0


def delete(**typed: Any) -> int:
    job_id, as_json = typed.pop("job"), typed.pop("json")
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        from bagua_agent.cluster_client import cluster_requests

        done = cluster_requests.delete(store, job_id, time.time())
    _say(as_json, done, {"job": job_id, "done": done})
    return 0


def drain(**typed: Any) -> int:
    node, force, reason, as_json = (typed.pop(n) for n in ("node", "force", "reason", "json"))
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        from bagua_agent.cluster_client import cluster_requests

        done = cluster_requests.drain(store, node, force=force, reason=reason or "")
    _say(as_json, done, {"node": node, "done": done})
    return 0


def undrain(**typed: Any) -> int:
    node, as_json = typed.pop("node"), typed.pop("json")
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        from bagua_agent.cluster_client import cluster_requests

        done = cluster_requests.undrain(store, node)
    _say(as_json, done, {"node": node, "done": done})
    return 0


JSON = click.Option(
    ["--json"], is_flag=True, help="Print JSON for programs: one value, or one line for each event."
)
_SPERSED = {**CONTEXT, "allow_interspersed_args": True}


def _command(
    name: str,
    callback: Callable[..., int],
    help: str,
    *more: click.Parameter,
    options: Sequence[Option] = CLUSTER_OPTIONS,
    hidden: bool = False,
) -> GroupedCommand:
    return GroupedCommand(
        name,
        callback=callback,
        help=help,
        short_help=help.split("\n")[0],
        context_settings=CONTEXT if name == "submit" else _SPERSED,
        options_metavar="[OPTIONS]",
        params=[*parameters(options), *more],
        hidden=hidden,
    )


COMMANDS = {
    command.name or "": command
    for command in (
        _command(
            "submit",
            submit,
            "Hand a job to the cluster's daemons; prints its id.\n\nSCRIPT and its directory are those of every node.",
            program_argument(), JSON,
            options=SUBMIT_OPTIONS,
        ),
        *(
            _command(
                name, status, "Show the jobs of an etcd, and why they wait. `list` and `ps` are the same.",
                click.Argument(["job"], required=False), JSON, hidden=name != "status",
            )
            for name in ("status", "list", "ps")
        ),
        _command("nodes", nodes, "List nodes, their health, and what they run.", JSON),
        _command(
            "events", events, "Show what happened to a job.", click.Argument(["job"]),
            click.Option(["-f", "--follow"], is_flag=True, help="Go on until it ends; exit with its code."), JSON,
        ),
        _command(
            "logs", logs, "Print the output of a job's workers.", click.Argument(["job"]),
            click.Option(["-f", "--follow"], is_flag=True, help="Go on until it ends."),
            click.Option(["--rank"], type=click.IntRange(0), metavar="N", help="Of this global rank alone."),
            click.Option(["--stream"], type=click.Choice(["out", "err", "both"]), default="both", show_default=True,
                         help="Standard output, standard error."),
            click.Option(["--last-bytes"], type=click.IntRange(0), default=0, metavar="N",
                         help="No more of each file than its last N bytes."),
            JSON,
        ),
        _command("stop", stop, "End a job at its next step boundary.", click.Argument(["job"]), JSON),
        _command(
            "delete", delete, "Remove a job that has ended: its records, and its logs on the nodes.",
            click.Argument(["job"]), JSON,
        ),
        _command(
            "drain", drain, "Drain a node: move its jobs away and schedule no new ones.", click.Argument(["node"]),
            click.Option(["--force"], is_flag=True, help="Also where a job then has too few nodes, and waits."),
            click.Option(["--reason"], metavar="TEXT", help="Shown by nodes and status."), JSON,
        ),
        _command("undrain", undrain, "Undo drain: schedule jobs on a node again.", click.Argument(["node"]), JSON),
    )
}  # fmt: skip
