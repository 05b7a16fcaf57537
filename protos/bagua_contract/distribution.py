"""The names under which this package is installed, and the other packages that own its module names.

The original Bagua is published as `bagua` (0.9.2 and before), `bagua-cuda...` and `bagua-core` (0.4.1 and before); each
brings a module named bagua_core. Installed into one environment, the files of whichever came last win.
"""

from __future__ import annotations

DISTRIBUTION = "bagua-elastic"
CUPY_HINT = f"install {DISTRIBUTION}[cuda12] or {DISTRIBUTION}[cuda13]"
REDIS_HINT = f"pip install {DISTRIBUTION}[redis]"

_CUDAS = ("101", "102", "110", "111", "113", "115", "116", "117")
_ORIGINALS = ("bagua", "bagua-core", *(f"bagua-cuda{number}" for number in _CUDAS))


def own_version() -> str | None:
    """Returns the version of this package; None where it runs from its sources without being installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def original_beside() -> str | None:
    """Returns a message for the user if a distribution of the original Bagua is in this environment; else None."""
    from importlib.metadata import PackageNotFoundError, version

    for name in _ORIGINALS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return (
            f"{name} {found} (the original Bagua) is installed beside {DISTRIBUTION}, and both own the module "
            f"bagua_core: pip uninstall {name}, then pip install --force-reinstall --no-deps {DISTRIBUTION}"
        )
    return None
