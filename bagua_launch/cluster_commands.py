"""The commands that talk to a cluster: submit, status, logs, drain, stop, delete and others. Thin: ask, then print."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bagua_agent.base.account_name import user_at_host
from bagua_agent.base.errors import UserError
from bagua_agent.base.plain_text import plain_line
from bagua_agent.base.time_of_day import time_of_day
from bagua_launch import scalar_values, tune_command, watch_commands
from bagua_launch.cluster_access import credentials_of, daemon_credentials
from bagua_launch.cluster_access import open_store as _store
from bagua_launch.cluster_access import values_of as _values
from bagua_launch.cluster_options import CLUSTER_OPTIONS, SUBMIT_OPTIONS
from bagua_launch.collectives_command import COLLECTIVES_HELP, COLLECTIVES_PARAMETERS, collectives
from bagua_launch.command_line import CONTEXT, GroupedCommand, note, parameters, program_argument
from bagua_launch.input_files import check_command, check_passed, current_directory
from bagua_launch.options import Option
from bagua_launch.tables import table
from bagua_launch.trace_command import trace

if TYPE_CHECKING:
    from bagua_agent.etcd.client import Store
    from bagua_agent.history.job_history import JobEvent
    from bagua_agent.observation.cluster_status import JobStatus


def submit(**typed: Any) -> int:
    program, as_json = typed.pop("program"), typed.pop("json")
    values = _values(SUBMIT_OPTIONS, typed)
    from bagua_launch.cluster_request import parse_submission

    submission = parse_submission(
        values,
        program,
        directory=current_directory(),
        environ=os.environ,
        submitter=user_at_host(),
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
        if not scalar_values.is_on(values, "follow"):
            return 0
        return _follow(store, submission.job_id, as_json)


def _say(as_json: bool, text: str, record: dict[str, Any]) -> None:
    """Prints one line: the sentence, or the record for programs."""
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


def _say_event(as_json: bool, event: JobEvent) -> None:
    at = time_of_day(event.time_unix_s)
    record = {
        "time_unix_s": event.time_unix_s,
        "node": event.node_name,
        "kind": event.kind.name.lower(),
        "text": event.text,
    }
    _say(as_json, f"{at} {event.node_name or '-'}: {event.text}", record)


def status(**typed: Any) -> int:
    """Prints one job with everything, or a table of all jobs."""
    job_id, as_json = typed.pop("job"), typed.pop("json")
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        from bagua_agent.cluster_client.cluster_requests import unknown_job
        from bagua_agent.cluster_client.replica_status import read_replicas
        from bagua_agent.cluster_client.started_jobs import started_job, started_jobs
        from bagua_agent.observation.cluster_status import cluster_status

        submitted = cluster_status(store, complain=note).jobs
        jobs = [j for j in submitted if job_id in (None, j.job_id)]
        if job_id is None:
            jobs += started_jobs(store, {j.job_id for j in submitted})
        elif not jobs and (by_hand := started_job(store, job_id)) is not None:
            jobs = [by_hand]
        if job_id is not None and not jobs:
            raise unknown_job(store, job_id)
        replicas = () if job_id is None else read_replicas(store, job_id, note)
    if as_json:
        more = {"replicas": [asdict(replica) for replica in replicas]} if replicas else {}
        click.echo(json.dumps([{**asdict(job), **more} for job in jobs], indent=1))
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
    if replicas:
        places = [
            ("-" if r.replica_rank is None else str(r.replica_rank), r.places, r.state) for r in replicas
        ]
        click.echo("\n" + table(("REPLICA", "NODE:SLOT BY SHARD", "STATE"), places, ""))
    return 0


def nodes(**typed: Any) -> int:
    as_json = typed.pop("json")
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        from bagua_agent.observation.cluster_status import cluster_status

        found = cluster_status(store, complain=note)
    if as_json:
        click.echo(json.dumps([asdict(node) for node in found.nodes], indent=1))
        return 0
    rows = [
        (
            n.node_name,
            n.state,
            f"{n.taken}/{n.slots}",
            ", ".join(f"{job_id} ({state})" for job_id, _, state in n.going),
            n.reason,
        )
        for n in found.nodes
    ]
    click.echo(table(("NODE", "STATE", "SLOTS", "JOBS", "WHY"), rows, "no daemon runs anywhere"))
    if not found.scheduler:
        click.echo("no daemon schedules at the moment", err=True)
    return 0


def events(**typed: Any) -> int:
    job_id, as_json, goes_on, plot = (typed.pop(n) for n in ("job", "json", "follow", "plot"))
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        code = _follow(store, job_id, as_json) if goes_on else 0
        from bagua_agent.cluster_client.cluster_requests import unknown_job
        from bagua_agent.etcd import cluster_keys
        from bagua_agent.etcd.keys import JobKeys
        from bagua_agent.history.job_history import events_of

        keys = JobKeys(job_id)
        records, _ = store.get_prefix(keys.events)
        if not records and store.get(cluster_keys.submission(job_id)) is None:
            raise unknown_job(store, job_id)
        found = events_of(records, keys)
        if plot:
            from bagua_launch.events_plot import plot_events

            plot_events(job_id, found, Path(plot))
            note(f"{plot} is written")
        elif not goes_on:
            for event in found:
                _say_event(as_json, event)
    return code


def logs(**typed: Any) -> int:
    job_id, rank, goes_on, stream, last, as_json = (
        typed.pop(n) for n in ("job", "rank", "follow", "stream", "last_bytes", "json")
    )
    values = _values(CLUSTER_OPTIONS, typed)
    streams = ("out", "err") if stream == "both" else (stream,)
    with _store(values) as store:
        from bagua_agent.cluster_client.cluster_requests import outcome_of
        from bagua_agent.cluster_client.log_reader import LogReader, WorkerOutput, is_followed, last_workers
        from bagua_agent.cluster_client.started_jobs import is_submitted, started_job

        if not is_submitted(store, job_id) and (by_hand := started_job(store, job_id)) is not None:
            return _logs_of_agents(store, by_hand, rank, streams, goes_on=goes_on, as_json=as_json)
        reader = LogReader(store, job_id, daemon_credentials(values))

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


def _logs_of_agents(
    store: Store, job: JobStatus, rank: int | None, streams: tuple[str, ...], *, goes_on: bool, as_json: bool
) -> int:
    """Prints the output of a job that was started by hand: its agents keep the newest lines."""
    from bagua_agent.cluster_client.started_jobs import no_logs
    from bagua_agent.observation.job_output import JobOutput, OutputLine

    if not job.nodes:
        raise no_logs(job)

    def tell(line: OutputLine) -> None:
        record = {"node": line.node_name, "rank": line.rank, "line": line.text}
        _say(as_json, line.text if rank is not None else f"[{line.label}] {line.text}", record)

    output = JobOutput(store, job.job_id, streams, rank, tell, note)
    try:
        if goes_on:
            output.follow()
        else:
            output.show()
    except KeyboardInterrupt:
        return 130
    finally:
        output.close()
    return 0


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


def tune(**typed: Any) -> int:
    job_id, as_json, forgets, plot = (typed.pop(n) for n in ("job", "json", "forget", "plot"))
    asked = tune_command.asked_settings(*(typed.pop(k) for k in ("bucket_size", "hierarchical", "algorithm")))
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        shown = tune_command.tune(store, job_id, asked, forgets=forgets, as_json=as_json)
        click.echo(shown if as_json else plain_line(shown))
        if plot:
            tune_command.plot(store, job_id, Path(plot))
            note(f"{plot} is written")
    return 0


def top(**typed: Any) -> int:
    job_id, as_json, every_s, once = (typed.pop(n) for n in ("job", "json", "every", "once"))
    with _store(_values(CLUSTER_OPTIONS, typed)) as store:
        return watch_commands.top(store, job_id, every_s=every_s, once=once, as_json=as_json)


def dashboard(**typed: Any) -> int:
    job_id, listen = typed.pop("job"), typed.pop("listen")
    values = _values(CLUSTER_OPTIONS, typed)
    place = watch_commands.dashboard_place(listen, credentials_of(values))
    with _store(values) as store:
        return watch_commands.dashboard(store, place, job_id)


JSON = click.Option(["--json"], is_flag=True, help="Print JSON: one value, or one line for each event.")
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
            click.Option(["-f", "--follow"], is_flag=True, help="Go on until it ends; exit with its code."),
            click.Option(["--plot"], metavar="FILE", help="Draw its generations over time, with causes and costs, as "
                         ".svg or .png; with --follow at its end. Needs matplotlib (extra plot)."),
            JSON,
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
        _command(
            "top", top, watch_commands.TOP_HELP, click.Argument(["job"]), *watch_commands.TOP_OPTIONS, JSON,
        ),
        _command("collectives", collectives, COLLECTIVES_HELP, *COLLECTIVES_PARAMETERS, JSON),
        _command(
            "dashboard", dashboard, watch_commands.DASHBOARD_HELP, click.Argument(["job"], required=False),
            watch_commands.LISTEN,
        ),
        _command("tune", tune, tune_command.HELP, click.Argument(["job"]), *tune_command.OPTIONS, JSON),
        _command(
            "trace", trace,
            "Record the next steps of a running job, for ui.perfetto.dev.\n\nCompute, bucket waits, collectives, "
            "commits, copies and changes of membership of all workers, on one time axis.",
            click.Argument(["job"]),
            click.Option(["--steps"], type=click.IntRange(1, 10_000), default=20, show_default=True, metavar="N",
                         help="Steps of each worker."),
            click.Option(["-o", "--out"], metavar="FILE", help="Default: JOB.trace.json."),
            click.Option(["--within"], type=click.FloatRange(0.1, 3600), default=300.0, show_default=True,
                         metavar="SECONDS", help="Write what has come by then."),
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
