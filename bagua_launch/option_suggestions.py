"""Suggests options for a mistyped one. Pure.

Owns the table of words that other launchers have for our options. Does not know which options a command has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_MOST = 3
_LEAST_ALIKE = 0.75  # below it, two words of this length share letters by chance
_LEAST_PART = 3  # shorter parts, as "id" and "no", occur within unrelated words

OF_OTHER_LAUNCHERS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "-n",  # also how `-np` arrives: a cluster of short options
            "--n",
            "--nprocs",
            "--nproc",
            "--num-proc",
            "--num-procs",
            "--procs",
            "--num-processes",
            "--workers",
            "--nworkers",
            "--num-workers",
            "--workers-per-node",
            "--ntasks",
            "--ntasks-per-node",
            "--tasks-per-node",
            "--ranks",
            "--ncores",
            "--cores",
            "--gpu",
            "--gpus",
            "--ngpus",
            "--num-gpus",
            "--gpus-per-node",
            "--devices",
        ),
        "--nproc-per-node",
    ),
    **dict.fromkeys(
        (
            "-N",
            "--nodes",
            "--num-nodes",
            "--min-nodes",
            "--max-nodes",
            "--num-machines",
            "--machines",
            "--min-np",
            "--max-np",
        ),
        "--nnodes",
    ),
    **dict.fromkeys(("-H", "--host", "--hostfile", "--machinefile"), "--hosts"),
    **dict.fromkeys(("--main-process-ip", "--master"), "--master-addr"),
    "--main-process-port": "--master-port",
    "--machine-rank": "--node-rank",
    "--elastic-timeout": "--rdzv-conf",
    "--logs": "--log-dir",
    "--output-dir": "--log-dir",
    "--job-id": "--rdzv-id",
    "--id": "--rdzv-id",
}
"""The option here for a word that people know from mpirun, srun, horovodrun, deepspeed or accelerate."""


def nearest(word: str, flags: Iterable[str]) -> list[str]:
    """Returns at most three of `flags` that `word` may mean, the likeliest first; empty if none is like it.

    In this order: what another launcher's word is here; options that begin so; options that have all parts of the
    word, as --proc in --nproc-per-node; the one with the most similar letters.
    """
    known = sorted({flag for flag in flags if flag.startswith("--")})
    if (same := OF_OTHER_LAUNCHERS.get(word)) in known:
        return [same]
    if not word.startswith("--"):
        return []
    begin = [flag for flag in known if flag.startswith(word)]
    if begin:
        return begin[:_MOST]
    sharing = [flag for flag in known if _has_all_parts(flag, word)]
    if sharing:
        return sorted(sharing, key=lambda flag: (len(_parts(flag)), flag))[:_MOST]
    from difflib import get_close_matches  # here: each agent would keep it in memory for a mistyped option

    # without the dashes, which all have in common
    names = {flag.removeprefix("--"): flag for flag in known}
    return [names[name] for name in get_close_matches(word.removeprefix("--"), names, 1, _LEAST_ALIKE)]


def _has_all_parts(flag: str, word: str) -> bool:
    there = _parts(flag)
    return all(any(_alike(part, other) for other in there) for part in _parts(word))


def _parts(flag: str) -> list[str]:
    return [part for part in flag.split("-") if part]


def _alike(part: str, other: str) -> bool:
    """Tells whether one begins or ends with the other: dir and directory, proc and nproc, restart and restarts."""
    short, long = sorted((part, other), key=len)
    return part == other or (len(short) >= _LEAST_PART and (long.startswith(short) or long.endswith(short)))
