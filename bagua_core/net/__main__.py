"""The command line of Bagua-Net: python -m bagua_core.net env"""

from __future__ import annotations

import shlex
import sys

from bagua_core.kernels.compilation import CompilationError
from bagua_core.kernels.cpu_library import LibraryUnavailableError
from bagua_core.net.build import library


def main(arguments: list[str]) -> int:
    if arguments != ["env"]:
        print("usage: eval $(python -m bagua_core.net env)", file=sys.stderr)
        return 2
    try:
        path = library()
    except (CompilationError, LibraryUnavailableError, OSError) as error:
        print(f"Bagua-Net is not available: {error}", file=sys.stderr)
        return 1
    print("export NCCL_NET_PLUGIN=bagua")
    print(f"export LD_LIBRARY_PATH={shlex.quote(str(path.parent))}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
