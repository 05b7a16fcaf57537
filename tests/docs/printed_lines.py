"""Compares the terminal's lines that a page prints with those of a real job.

Pure. Times, names of hosts, addresses, ids, paths, durations, and numbers of steps, generations and ranks differ from
run to run and are replaced by words. So is what depends on which process notices a loss first: the error of a
connection, the reason why an agent counts as gone, and the cost of a change. Every other character must be equal.
"""

from __future__ import annotations

import os
import re

from bagua_contract.time_use import LOST_TO_CHANGES

GAP = "..."  # on a line of its own: other lines come between, or another terminal's begin
_HOST = rf"\b(?:h\d+|vm(?:-\d+)?|{re.escape(os.uname().nodename)})\b"
_SECONDS = r"\d+(?:\.\d+)?(?:e-\d+)? m?s"
_USE = rf"(?:{'|'.join(use.value.replace('_', ' ') for use in LOST_TO_CHANGES)})(?: {_SECONDS})?"
_REPLACED = [  # in this order
    (re.compile(rf"; (?:less than )?{_SECONDS} without steps(?:: {_USE}(?:, {_USE})*)?"), ""),
    (re.compile(r"\b\d\d:\d\d:\d\d\b|\b\d{8}T\d{6}Z\b"), "TIME"),
    (re.compile(r"\[?\b\d+\.\d+\.\d+\.\d+\b\]?(?::\d+)?"), "ADDRESS"),
    (re.compile(r"\w+: (?:Read error|Connection closed by peer) ADDRESS(?:: Connection reset by peer)?"), "CONNECTION"),
    (re.compile(rf"{_HOST}-[0-9a-f]{{6}}\.\d+\.[0-9a-f]{{6}}"), "WORKER"),
    (re.compile(r"/\S+/\S*"), "PATH"),
    (re.compile(r"\bjob \S+?(?=:? (?:failed|stopped|succeeded|\d+ workers? here))"), "job ID"),
    (re.compile(_HOST), "HOST"),
    (re.compile(r"answered neither .+? nor (?:a third agent|HOST)"), "IS AWAY"),
    (re.compile(r"refused the connection|is gone|did not answer(?:, and refused HOST)?"), "IS AWAY"),
    (re.compile(r"\bglobal ranks? \d+(?:, \d+)*"), "global ranks N"),  # lost in one decision or one after the other
    (re.compile(r"\b(steps?|generation|rank|epoch) \d+"), r"\1 N"),
    (re.compile(rf"\b{_SECONDS}\b"), "N s"),
    (re.compile(r"did not happen: (?:CONNECTION\.?|generation N: lost .+ \(the agent IS AWAY\))"), "did not happen"),
    (re.compile(r"(\w+\.py):\d+"), r"\1:N"),
    (re.compile(r"\bnumber \d+"), "number N"),
    (re.compile(r"\b\d[\d,]*(?= (?:bytes|collectives begun)\b)"), "N"),
    (re.compile(r"\b(loss|accuracy) [\d.]+"), r"\1 N"),
    (re.compile(r"(loss N, )(?:mean|\d+)(?= of \d+ workers)"), r"\1mean"),
    (re.compile(r"\b[\d.]+(?= (?:steps|samples)/s)"), "N"),
    (re.compile(r"^(epoch N: )\d+(?= workers)"), r"\1N"),  # a successor may come before the epoch's end
]  # fmt: skip
_OF_AGENT = re.compile(r"bagua TIME ")


def normalised(line: str) -> str:
    """The line without what differs from run to run."""
    for pattern, word in _REPLACED:
        line = pattern.sub(word, line)
    return line.rstrip()


def parts(text: str) -> list[list[str]]:
    """The lines of a block, divided at its gaps."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line == GAP:
            found.append([])
        else:
            found[-1].append(line)
    return found


def missing(printed: list[str], output: str) -> list[str]:
    """The printed lines that do not appear in `output`, in the order of their writer.

    The agent and the workers write to one terminal, so lines of different writers have no order.
    """
    lines = [normalised(line) for line in output.splitlines()]
    left = {of_agent: [x for x in lines if _is_of_agent(x) is of_agent] for of_agent in (False, True)}
    found = []
    for line in printed:
        wanted = normalised(line)
        own = left[_is_of_agent(wanted)]
        if wanted in own:
            del own[: own.index(wanted) + 1]
        else:
            found.append(line)
    return found


def _is_of_agent(line: str) -> bool:
    return _OF_AGENT.match(line) is not None
