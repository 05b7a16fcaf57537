"""Gives workers the variables by which NCCL loads Bagua-Net (--enable-bagua-net)."""

from __future__ import annotations

import subprocess
import sys

from bagua_contract import net_variables as plugin_variables
from bagua_launch import scalar_values
from bagua_launch.errors import RequestError
from bagua_launch.written_values import Values

PATH_COMMAND = (sys.executable, "-m", "bagua_core.net", "path")  # a process of its own: it imports torch
WITHIN_S = 400.0  # longer than the compiler may take


def net_variables(values: Values) -> dict[str, str]:
    """Returns the variables of the workers; compiles the plugin if need be. Raises RequestError if it can't."""
    if not scalar_values.is_on(values, "enable_bagua_net"):
        return {}
    written = values["enable_bagua_net"]
    try:
        found = subprocess.run(
            PATH_COMMAND,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise RequestError(
            f"{written.where}: Bagua-Net was not ready after {WITHIN_S:g} s; leave it out"
        ) from error
    if found.returncode != 0:
        last = (found.stderr.strip().splitlines() or [f"exit code {found.returncode}"])[-1]
        raise RequestError(f"{written.where}: {last}; or leave it out")
    return plugin_variables.loading(found.stdout.strip())
