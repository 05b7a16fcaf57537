"""Answers which collectives of this worker are under way, of Bagua's communicators and of torch's process groups.

Torch's come from its flight recorder, which NCCL and Gloo fill (TORCH_FR_BUFFER_SIZE=0 turns it off). Runs in the
thread that answers for stacks, so nothing here waits for another thread or imports a library: it reads what is loaded
already. Its value is a text of JSON, which the reader checks (bagua_agent/observation/collectives.py).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

MOST_GROUPS = 64
MOST_SHOWN = 64  # operations of a group
_RECORD = "bagua_core.communication.flight_record"
_TORCH = "torch._C._distributed_c10d"
_GROUPS = "torch.distributed.distributed_c10d"


def answer() -> str:
    record = sys.modules.get(_RECORD)
    found = {"groups": [], "buckets": []} if record is None else record.answer()
    try:
        groups, problem = _of_torch()
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        groups, problem = [], f"torch's flight recorder can't be read ({type(error).__name__}: {error})"
    return json.dumps({**found, "torch": groups, "torch_problem": problem})


def _of_torch() -> tuple[list[dict[str, Any]], str]:
    """Returns the collectives of torch's groups, and the reason why there are none; empty if there may be some."""
    # NCCL has a recorder of its own
    dumps = [getattr(sys.modules.get(_TORCH), f"_dump_{kind}_trace_json", None) for kind in ("nccl", "fr")]
    world = getattr(sys.modules.get(_GROUPS), "_world", None)
    if world is None:
        return [], "the script has not imported torch.distributed"
    # copies: the script's thread may make a group meanwhile
    names, ranks = dict(world.pg_names), {g: dict(r) for g, r in dict(world.pg_group_ranks).items()}
    if not names:
        return [], "the script has no process group of torch's"
    entries = [json.loads(dump(True, False)).get("entries") or [] for dump in dumps if dump is not None]
    if not entries:
        return [], "this torch has no flight recorder that can be read as JSON"
    members = {name: ranks.get(group, {}) for group, name in names.items()}
    return flights([entry for each in entries for entry in each], members, time.time_ns()), ""


def flights(
    entries: list[dict[str, Any]], members: dict[str, dict[int, int]], now_ns: int
) -> list[dict[str, Any]]:
    """Returns the groups of torch's in the form of flight_record.py's. entries: as torch writes them, oldest first.
    members: global ranks with their places in the group, by the group's name. Those of other names are Bagua's own."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        name, description = (*entry.get("process_group", ()), "", "")[:2]
        if name not in members:
            continue
        transport, _, what = str(entry.get("profiling_name", "")).partition(":")
        group = groups.setdefault(
            (name, transport),
            {
                "name": f"{name} ({description})" if description not in ("", "undefined") else name,
                "transport": transport,
                "generation": 0,
                "ranks": sorted(members[name], key=lambda rank: members[name][rank]),
                "place": -1,
                "begun": 0,
                "under_way": [],
            },
        )
        number = 0 if entry.get("is_p2p") else int(entry.get("collective_seq_id", 0))
        group["begun"] = max(group["begun"], number)
        # Gloo's have no state but this one
        if entry.get("retired") or entry.get("state") == "completed" or len(group["under_way"]) >= MOST_SHOWN:
            continue
        group["under_way"].append(
            {
                "number": number,
                "what": what,
                "bytes": 0,
                "elements": sum(_elements(sizes) for sizes in entry.get("input_sizes", ())),
                "since_s": (now_ns - int(entry.get("time_created_ns", now_ns))) * 1e-9,
                "state": str(entry.get("state", "")),
            }
        )
    return list(groups.values())[-MOST_GROUPS:]


def _elements(sizes: list[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count
