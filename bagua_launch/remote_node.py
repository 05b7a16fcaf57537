"""Runs one node of `--hosts` on its host, as if a person had typed its command there.

The host's own launch.toml and variables count, except for what the terminal decides (`ssh_hosts.py`).

Started over ssh. It reads what to do from its standard input: one line of JSON, then nothing while the job runs.
"leave" asks it to go at a step boundary; the end of the input means that the terminal is gone, and the node ends at
once. Nothing secret is in its command line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import TextIO

from bagua_launch.ssh_hosts import LEAVE, SSH_FAILED

LARGEST_CODE = SSH_FAILED - 1


def main(source: TextIO) -> int:
    request = json.loads(source.readline())
    directory = Path(tempfile.mkdtemp(prefix="bagua-node-"))  # 0700
    try:
        for name, text in request["files"].items():
            path = directory / Path(name).name
            path.touch(0o600)
            path.write_text(text)
        words = [w.replace("@FILES@", str(directory)) for w in request["arguments"]]
        os.environ.update(request["environment"])
        try:
            os.chdir(request["directory"])
        except OSError as error:
            print(
                f"bagua-launch: {request['directory']!r} on {os.uname().nodename}: {error.strerror}",
                file=sys.stderr,
            )
            return 2
        threading.Thread(target=_listen, args=(source,), name="bagua-terminal", daemon=True).start()
        only_typed = request.get("only_typed", ())  # absent in a request of an earlier version
        from bagua_launch.main import cli

        try:
            cli.main(["run", *words], prog_name="bagua-launch", obj=frozenset(only_typed))
        except SystemExit as end:  # with it click also says a mistake, in one line
            code = end.code if isinstance(end.code, int) else 1
            # a worker's sys.exit(-1) is 255 too: the terminal would take it for a host that ssh has lost
            return LARGEST_CODE if code & 0xFF == SSH_FAILED else code
        return 0
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _listen(source: TextIO) -> None:
    """Turns each LEAVE that is read into one more Ctrl-C (see bagua_agent/node/stop_signals.py), and ends the node when
    the input ends."""
    while line := source.readline():
        if line.strip() == LEAVE:
            os.kill(os.getpid(), signal.SIGINT)
    # The terminal is gone, and with it the job's etcd: no agent can write a generation for us to leave by. Two signals
    # of different numbers, since two of one number may be merged.
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)


def _take_stdin() -> TextIO:
    """Returns the standard input and puts /dev/null in its place: workers, which inherit stdin, must not read it."""
    source = os.fdopen(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return source


if __name__ == "__main__":
    sys.exit(main(_take_stdin()))
