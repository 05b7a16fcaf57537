"""The command line of Bagua-Net: python -m bagua_core.net env, check, or path."""

from __future__ import annotations

import shlex
import sys

from bagua_core.kernels.compilation import CompilationError
from bagua_core.kernels.cpu_library import LibraryUnavailableError
from bagua_core.net.build import find_compiler, library
from bagua_core.net.check import report


def main(arguments: list[str]) -> int:
    if arguments not in (["env"], ["check"], ["path"]):
        print(
            "usage: eval $(python -m bagua_core.net env), or python -m bagua_core.net check | path",
            file=sys.stderr,
        )
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
