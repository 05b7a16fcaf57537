"""Compiles the CPU's library and prints the targets of this machine: python -m bagua_core.kernels.build"""

from __future__ import annotations

import sys

from bagua_core.kernels.compiled_cache import LibraryUnavailableError
from bagua_core.kernels.cpu_library import find


def main() -> int:
    try:
        print(f"the CPU's kernels: {find().where}")
    except LibraryUnavailableError as error:
        print(f"no library for the CPU's kernels, so torch's operators serve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
