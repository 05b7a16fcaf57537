"""Implements `bagua-launch trace`: writes a trace of a running job into a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from bagua_agent.base.account_name import user_at_host
from bagua_agent.base.plain_text import counted, plain_line
from bagua_launch.cluster_access import open_store, values_of
from bagua_launch.cluster_options import CLUSTER_OPTIONS
from bagua_launch.command_line import INTERRUPTED, note
from bagua_launch.errors import RequestError


def trace(**typed: Any) -> int:
    """Writes the trace. Returns exit code 0; INTERRUPTED after Ctrl-C, when what came until then is written."""
    job_id, steps, out, within_s, as_json = (typed.pop(n) for n in ("job", "steps", "out", "within", "json"))
    path = Path(out or f"{job_id}.trace.json")
    _check_place(path)
    with open_store(values_of(CLUSTER_OPTIONS, typed)) as store:
        from bagua_agent.cluster_client.chrome_trace import chrome_trace
        from bagua_agent.cluster_client.trace_reader import TraceReader

        asker = f"{user_at_host()} (process {os.getpid()})"
        reader = TraceReader(store, job_id, steps, within_s, asker, lambda text: note(plain_line(text)))
        code = 0
        try:
            try:
                found = reader.collect()
            except KeyboardInterrupt:
                code, found = INTERRUPTED, reader.finish()
        finally:
            reader.close()
    try:
        path.write_text(json.dumps(chrome_trace(found), ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"can't write {path}: {error.strerror}; use --out FILE") from error
    spans = sum(len(worker.spans) for worker in found.workers.values())
    recorded = sum(1 for worker in found.workers.values() if worker.spans)
    record = {
        "job": job_id,
        "file": str(path),
        "workers": recorded,
        "spans": spans,
        "clock_error_us": found.clock_error_ns / 1000,
        "missing": found.remarks,
    }
    text = (
        f"{path}: {counted(spans, 'span')} of {counted(recorded, 'worker')}; clocks of the nodes are known to "
        f"{found.clock_error_ns / 1e6:.3f} ms; open it at https://ui.perfetto.dev"
    )
    click.echo(json.dumps(record) if as_json else plain_line(text))
    return code


def _check_place(path: Path) -> None:
    """Raises RequestError if the file can't be written; called before the job records, to spare it a trace in vain."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise RequestError(f"can't write {path}: there is no such folder, or it is one; use --out FILE")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise RequestError(f"can't write {path}: permission denied, or its disk is read-only; use --out FILE")
