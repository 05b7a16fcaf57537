"""Parses the hosts of `--hosts`, and builds the command that each of them runs. Pure.

The command that a person would type on every host, except the rendezvous, which the starting terminal hosts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua_launch.errors import refuse
from bagua_launch.options import RUN_OPTIONS
from bagua_launch.written_values import WrittenValue

# user@host, host, [v6]; a leading dash would be an option of ssh
_TARGET = re.compile(r"([A-Za-z_][A-Za-z0-9._-]*@)?([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])")

LEAVE = "leave"
"""What the terminal tells a node that should leave at a step boundary."""

SSH_FAILED = 255
"""The exit code with which ssh reports that it failed itself."""

# options that say where the nodes meet, or which node this is: the terminal's affair here
OWN = frozenset(
    {
        *(
            "hosts",
            "ssh",
            "remote_python",
            "env",
            "rdzv_endpoint",
            "rdzv_id",
            "rdzv_backend",
            "standalone",
            "nnodes",
        ),
        *("nproc_per_node", "local_addr", "master_addr", "master_port", "node_rank"),
        *("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file"),
    }
)
# of those, what describes one host: there its own file or variable may give it
_OF_THE_HOST = frozenset({"nproc_per_node", "local_addr"})
_DECIDED = OWN - _OF_THE_HOST
# options whose value is written behind "=" alone
_BARE = frozenset(option.key for option in RUN_OPTIONS if option.bare_value)
_SWITCHES = frozenset(option.key for option in RUN_OPTIONS if option.is_switch)


@dataclass(frozen=True, slots=True)
class SshHost:
    """A host of --hosts. target: as ssh takes it. slots: its own number of workers; None: as --nproc-per-node says."""

    target: str
    slots: str | None = None

    @property
    def address(self) -> str:
        """The host's name or address, without the user."""
        return self.target.rpartition("@")[2].strip("[]")


def parse_hosts(written: WrittenValue) -> tuple[SshHost, ...]:
    """Parses --hosts. Raises RequestError for a host that is no host or is listed twice, and for a wrong number."""
    found = []
    for part in written.text.split(","):
        name, colon, slots = (part, "", "") if part.endswith("]") else part.rpartition(":")
        if not colon:
            name, slots = part, ""
        if not _TARGET.fullmatch(name):
            raise refuse(
                written, f"{part!r} is no host", "HOST, USER@HOST or HOST:SLOTS, separated by commas"
            )
        if colon and not re.fullmatch(r"[1-9][0-9]{0,4}|auto|gpu|cpu", slots):
            raise refuse(written, f"{slots!r} is no number of workers", "HOST:8, or HOST alone")
        found.append(SshHost(name, slots or None))
    twice = sorted({h.target for h in found if [o.target for o in found].count(h.target) > 1})
    if twice:
        raise refuse(
            written, f"{', '.join(twice)} is there twice", "each host once, as HOST:16 for more workers"
        )
    return tuple(found)


def only_typed_on_hosts(values: Mapping[str, WrittenValue]) -> frozenset[str]:
    """Returns the keys that a host takes from its line alone, and not from its own file or variables.

    They are what the terminal decides for every node, or the host would meet elsewhere, or start the job on all hosts
    again; and switches that the terminal has off, which no word of a line says.
    """
    return _DECIDED | {key for key, written in values.items() if key in _SWITCHES and written.text == "false"}


def node_arguments(
    host: SshHost,
    values: Mapping[str, WrittenValue],
    program: Sequence[str],
    *,
    nodes: str,
    endpoint: str,
    job_id: str,
    credentials: Mapping[str, str],
) -> list[str]:
    """Returns the words that follow `bagua-launch run` on this host. credentials: option to file, on the host."""
    words = ["--nnodes", nodes, "--rdzv-endpoint", endpoint, "--rdzv-id", job_id]
    slots = host.slots or (values["nproc_per_node"].text if "nproc_per_node" in values else None)
    if slots is not None:
        words += ["--nproc-per-node", slots]
    for name, path in credentials.items():
        words += [name, path]
    if "label_output" not in values and "tee" not in values:
        words.append("--label-output")  # one terminal shows the lines of all hosts
    for key, written in values.items():
        if key in OWN:
            continue
        flag = "--" + key.replace("_", "-")
        if key in _SWITCHES:
            words += [flag] if written.text == "true" else []
        elif key in _BARE:
            words.append(f"{flag}={written.text}")  # the next word would be the script
        else:
            words += [flag, written.text]
    return [*words, *program]
