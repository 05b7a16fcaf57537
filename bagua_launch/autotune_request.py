"""Reads the options of autotuning into fields of JobConfig."""

from __future__ import annotations

from typing import Any

from bagua_contract.step_settings import SWITCHABLE
from bagua_launch import scalar_values
from bagua_launch.errors import refuse
from bagua_launch.written_values import Values, WrittenValue

LEVELS = ("0", "1", "2")


def parse_autotune(values: Values) -> dict[str, Any]:
    """Returns the fields of autotuning that were given. Raises RequestError."""
    fields: dict[str, Any] = {}
    if "autotune_level" in values:
        fields["autotune_level"] = int(scalar_values.choice(*LEVELS)(values["autotune_level"]))
    if "autotune_max_samples" in values:
        fields["autotune_max_samples"] = _positive(values["autotune_max_samples"])
    if "autotune_sampling_confidence_time" in values:
        written = values["autotune_sampling_confidence_time"]
        fields["autotune_confidence_s"] = scalar_values.seconds(written)
        if not fields["autotune_confidence_s"]:
            raise refuse(written, "a trial needs time", "seconds, such as 5")
    if "autotune_warmup_time" in values:
        fields["autotune_warmup_s"] = scalar_values.seconds(values["autotune_warmup_time"])
    if "is_output_autotune_log" in values:
        fields["autotune_verbose"] = scalar_values.switch(values["is_output_autotune_log"])
    if "autotune_algorithms" in values:
        written = values["autotune_algorithms"]
        if fields.get("autotune_level") != 2:
            raise refuse(written, "algorithms are tried at level 2 alone", "--autotune-level 2 with it")
        fields["autotune_algorithms"] = _algorithms(written)
    return fields


def _positive(written: WrittenValue) -> int:
    count = scalar_values.count(written)
    if not count:
        raise refuse(written, "a study needs a trial", "a number from 1 on")
    return count


def _algorithms(written: WrittenValue) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in written.text.split(",") if name.strip()))
    for name in names:
        if name not in SWITCHABLE:
            raise refuse(written, f"no running job can take algorithm {name!r}", ",".join(SWITCHABLE))
    return names
