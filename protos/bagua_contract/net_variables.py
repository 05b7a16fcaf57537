"""The environment variables by which NCCL loads Bagua-Net, and keeps it."""

from __future__ import annotations

# By default NCCL 2.28 and later unload a plugin with the last communicator, as when a loss ends them all. 2.28 and 2.29
# forget its name then (NVIDIA/nccl#1978), so that survivors would go on by sockets and reach no newcomer.
KEEPS_LOADED = {"NCCL_NET_PLUGIN_REF_COUNT": "1"}


def loading(plugin: str) -> dict[str, str]:
    """Returns the variables for a plugin: a path, or a name that NCCL looks for in LD_LIBRARY_PATH."""
    return {"NCCL_NET_PLUGIN": plugin, **KEEPS_LOADED}
