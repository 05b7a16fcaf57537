"""Implements the commands of the original Bagua: `baguarun`, `python -m bagua_core.distributed.launch` and `.run`.

Each prints what it hands to bagua-launch, so that the line can be kept instead.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

import click

from bagua_agent.base import standard_streams
from bagua_agent.base.errors import UserError
from bagua_agent.base.quiet_grpc import keep_quiet
from bagua_launch.cluster_options import FILE_OPTIONS
from bagua_launch.command_line import PROGRAM, complain, note
from bagua_launch.config_file import read_config_file
from bagua_launch.errors import RequestError
from bagua_launch.main import cli
from bagua_launch.original_flags import Original, described, translate

_HELP = {"-h", "--help"}
_HELP_WIDTH = 100


def launch(kind: Original, words: Sequence[str]) -> int:
    """Runs the translated command and exits with the job's code. Returns the code of --help, or 2 for a mistake."""
    if words and words[0] in _HELP:
        print(f"{help_text(kind)}\nThe help of bagua-launch:\n")
        return int(cli.main(["run", "--help"], prog_name=PROGRAM, standalone_mode=False) or 0)
    try:
        made = translate(kind, words, os.environ, read_config_file(os.environ, FILE_OPTIONS))
    except RequestError as error:
        complain(str(error))
        return UserError.exit_code
    for line in made.notes:
        note(line)
    shown = [f"{name}={shlex.quote(value)}" for name, value in made.environment.items()]
    note(f"{kind.value} is: {' '.join([*shown, PROGRAM, shlex.join(made.arguments)])}")
    os.environ.update(made.environment)
    cli.main(["run", *made.arguments], prog_name=PROGRAM)  # exits
    return 0


def help_text(kind: Original) -> str:
    """Returns the help of the launcher: the flags that it takes in addition to the options of bagua-launch."""
    formatter = click.HelpFormatter(width=_HELP_WIDTH)
    program = kind.value if kind is Original.BAGUARUN else f"python -m {kind.value}"
    formatter.write_usage(program, "[OPTIONS] SCRIPT [ARGUMENTS]...")
    formatter.write_paragraph()
    formatter.write_text(
        "Takes the options of bagua-launch, with - or _ between words, and these of the original:"
    )
    formatter.write_dl(described(kind))
    return formatter.getvalue()


def baguarun_help() -> str:
    return help_text(Original.BAGUARUN)


def launch_help() -> str:
    return help_text(Original.LAUNCH)


def run_help() -> str:
    return help_text(Original.RUN)


def baguarun() -> None:
    standard_streams.open_missing()
    keep_quiet()
    sys.exit(launch(Original.BAGUARUN, sys.argv[1:]))


def main() -> None:
    """Runs `python -m bagua_launch.original_main launch|run ...`, by which bagua_core, which knows no launcher, starts
    one."""
    standard_streams.open_missing()
    keep_quiet()
    names = {"launch": Original.LAUNCH, "run": Original.RUN}
    sys.exit(launch(names[sys.argv[1]], sys.argv[2:]))


if __name__ == "__main__":
    main()
