"""Decides what torchrun's output flags mean: which stream of which slot goes to a file, the terminal, or both.

Pure: text in, frozen values out. Errors name the flag and the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from string import Template

from bagua_agent.base.errors import UserError


class Streams(IntFlag):
    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """A choice of streams for each slot: a default, and slots that differ."""

    default: Streams = Streams.NONE
    by_slot: Mapping[int, Streams] = field(default_factory=dict)

    def of(self, slot: int) -> Streams:
        return self.by_slot.get(slot, self.default)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The destinations of one stream of one worker. filters: lines with any of these also go to the common file."""

    file: bool
    terminal: bool
    filters: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The output flags of a job, parsed. local_ranks_filter: slots that may write to the terminal; None for all.

    role, prefix_template: make the prefix of teed lines, as torchrun's. labels: every line begins with node and slot.
    """

    redirects: StreamChoice = StreamChoice()
    tee: StreamChoice = StreamChoice()
    local_ranks_filter: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    role: str = "default"
    prefix_template: str = ""
    labels: bool = False

    @staticmethod
    def parse(
        *,
        redirects: str = "0",
        tee: str = "0",
        local_ranks_filter: str = "",
        duplicate_stdout_filters: str = "",
        duplicate_stderr_filters: str = "",
        role: str = "default",
        prefix_template: str = "",
        labels: bool = False,
    ) -> OutputOptions:
        """Makes the options from the flags' texts. Raises UserError."""
        return OutputOptions(
            redirects=parse_streams("--redirects", redirects),
            tee=parse_streams("--tee", tee),
            local_ranks_filter=parse_slots("--local-ranks-filter", local_ranks_filter),
            stdout_filters=parse_filters(duplicate_stdout_filters),
            stderr_filters=parse_filters(duplicate_stderr_filters),
            role=role,
            prefix_template=prefix_template,
            labels=labels,
        )

    def plan(self, slot: int, stream: Streams) -> StreamPlan:
        """Returns where a stream goes. Redirected: file only. Teed: file and terminal. Neither: terminal only."""
        if stream not in (Streams.OUT, Streams.ERR):
            raise ValueError(f"plan of {stream!r}: one stream at a time")
        teed = bool(self.tee.of(slot) & stream)
        redirected = bool(self.redirects.of(slot) & stream)
        shown = self.local_ranks_filter is None or slot in self.local_ranks_filter
        texts = self.stdout_filters if stream is Streams.OUT else self.stderr_filters
        return StreamPlan(
            file=teed or redirected,
            terminal=shown and (teed or not redirected),
            filters=tuple(os.fsencode(text) for text in texts),
        )

    def inherits(self, slot: int, stream: Streams) -> bool:
        """Tells whether nothing reads the stream: as under torchrun, the worker may have the agent's own terminal."""
        plan = self.plan(slot, stream)
        return plan.terminal and not plan.file and not plan.filters and not self.labels

    def shows_several(self, slots: int) -> bool:
        """Tells whether several workers of this node write to the terminal, so that lines are kept whole."""
        streams = (Streams.OUT, Streams.ERR)
        return sum(any(self.plan(slot, s).terminal for s in streams) for slot in range(slots)) > 1

    def tag(self, slot: int, global_rank: int, node_name: str) -> str:
        """Returns the text that says whose line it is, in front of teed lines and of lines in the filtered files."""
        if self.labels:
            return f"[{node_name}:{slot}]: "
        if not self.prefix_template:
            return f"[{self.role}{slot}]:"
        values = {
            "role_name": self.role,
            "rank": str(global_rank),
            "local_rank": str(slot),
            "hostname": node_name,
        }
        return Template(self.prefix_template).safe_substitute(values)

    def is_tagged(self, slot: int, stream: Streams) -> bool:
        """Tells whether lines on the terminal begin with the tag."""
        return self.labels or bool(self.tee.of(slot) & stream)


def parse_streams(flag: str, text: str) -> StreamChoice:
    """Parses "3" for every slot, or "0:1,1:2" for the slots named (the others: none)."""
    text = text.strip()
    if re.fullmatch(r"[0-3]", text):
        return StreamChoice(Streams(int(text)))
    if re.fullmatch(r"(\d+:[0-3],)*\d+:[0-3]", text):
        pairs = [entry.split(":") for entry in text.split(",")]
        return StreamChoice(Streams.NONE, {int(slot): Streams(int(value)) for slot, value in pairs})
    raise UserError(
        f"{flag} {text!r} is neither 0..3 (0 none, 1 stdout, 2 stderr, 3 both)"
        ' nor a list of local_rank:value such as "0:3,1:2"'
    )


def parse_slots(flag: str, text: str) -> frozenset[int] | None:
    """Parses slots: "0,2" names slots 0 and 2; an empty text is no filter."""
    if not text.strip():
        return None
    entries = [entry.strip() for entry in text.split(",")]
    wrong = next((entry for entry in entries if not re.fullmatch(r"\d+", entry)), None)
    if wrong is not None:
        raise UserError(f"{flag} {text!r}: {wrong!r} is not a local rank; give a list such as 0,2")
    return frozenset(int(entry) for entry in entries)


def parse_filters(text: str) -> tuple[str, ...]:
    """Parses filters separated by commas; a double comma is a comma inside a filter."""
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)
