"""The command line of Bagua-Net: python -m bagua_core.net env, check, path, or counters."""

from __future__ import annotations

import json
import shlex
import sys

from bagua_contract import net_counters as counters
from bagua_core.kernels.compilation import CompilationError
from bagua_core.kernels.cpu_library import LibraryUnavailableError
from bagua_core.net.build import find_compiler, library
from bagua_core.net.check import report

USAGE = """usage: eval $(python -m bagua_core.net env)
       python -m bagua_core.net check | path
       python -m bagua_core.net counters [PID ...]"""


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["counters"] and all(word.isdecimal() for word in arguments[1:]):
        return print_counters([int(word) for word in arguments[1:]])
    if arguments not in (["env"], ["check"], ["path"]):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        path = library()
    except (CompilationError, LibraryUnavailableError, OSError) as error:
        print(f"Bagua-Net is not available: {error}", file=sys.stderr)
        return 1
    if arguments == ["check"]:
        return 0 if report(path, " ".join(find_compiler())) else 1
    if arguments == ["path"]:
        print(path)
        return 0
    # one command: eval $(...) without quotes joins lines
    variable = f"LD_LIBRARY_PATH={shlex.quote(str(path.parent))}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
    print(f"export NCCL_NET_PLUGIN=bagua {variable}")
    return 0


def print_counters(pids: list[int]) -> int:
    """One line of JSON for each process; without pids, of every process of this machine that has the plugin."""
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
    sys.exit(main(sys.argv[1:]))
