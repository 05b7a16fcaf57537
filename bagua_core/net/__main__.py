"""The command line of Bagua-Net: python -m bagua_core.net env, check, path, or counters."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence

from bagua_contract import net_counters as counters
from bagua_contract import net_variables
from bagua_core.kernels.compilation import CompilationError
from bagua_core.kernels.compiled_cache import LibraryUnavailableError
from bagua_core.net.build import find_compiler, library
from bagua_core.net.check import report


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bagua_core.net",
        description="Compile Bagua-Net, NCCL's network plugin, and show how NCCL uses it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        (
            "env",
            "Print the shell's command that makes NCCL load the plugin: eval $(python -m bagua_core.net env)",
        ),
        ("check", "Report whether NCCL would load the plugin here, and which NICs it finds."),
        ("path", "Print the path of the plugin's library."),
    ):
        commands.add_parser(name, help=text, description=text)
    text = "Print what programs have moved by the plugin: a line of JSON for each process."
    counting = commands.add_parser("counters", help=text, description=text)
    counting.add_argument(
        "pids",
        metavar="PID",
        type=int,
        nargs="*",
        help="Default: every process of this machine that has the plugin.",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = command_parser().parse_args(arguments)
    if given.command == "counters":
        return print_counters(given.pids)
    try:
        path = library()
    except (CompilationError, LibraryUnavailableError, OSError) as error:
        print(f"Bagua-Net is not available: {error}", file=sys.stderr)
        return 1
    if given.command == "check":
        return 0 if report(path, " ".join(find_compiler())) else 1
    if given.command == "path":
        print(path)
        return 0
    # one command: eval $(...) without quotes joins lines
    variable = f"LD_LIBRARY_PATH={shlex.quote(str(path.parent))}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
    names = " ".join(f"{name}={value}" for name, value in net_variables.loading("bagua").items())
    print(f"export {names} {variable}")
    return 0


def print_counters(pids: list[int]) -> int:
    """Prints one line of JSON for each process; without pids, of every process of this machine that has the plugin."""
    try:
        found = [(pid, counters.read(pid)) for pid in pids] if pids else list(counters.processes())
    except counters.NoCountersError as error:
        print(error, file=sys.stderr)
        return 1
    for pid, values in found:
        print(json.dumps({"pid": pid, **values}))
    if not found:
        print("no process of this user has loaded Bagua-Net", file=sys.stderr)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
