"""Shows the data of the dashboard's page as text, for `bagua-launch top`. Pure: a page in, lines out."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from bagua_agent.base.plain_text import duration, plain_line
from bagua_agent.base.time_of_day import time_of_day
from bagua_agent.dashboard.page_data import Page

_MARKS = {"good": "ok", "waiting": "..", "warning": "!", "bad": "!!"}
_SHORTEST_SHOWN_S = 0.01
_MOST_METRICS = 4
_WIDTH = 200  # of lines that no terminal shows
_CONTINUED = " " * 10  # behind a time of day


def summary_line(page: Page) -> str:
    """Returns one line for a log: time, verdict, progress, goodput."""
    at = time_of_day(page["at"])
    said = page["verdict"]
    why = f" {said['why']}" if said["why"] and said["level"] != "good" else ""
    share = page["goodput"]["share"]
    goodput = "" if share is None else f"  goodput {share:.1%}"
    progress = progress_line(page)
    return plain_line(f"{at} {said['what']}{why}{'  ' if progress else ''}{progress}{goodput}")


def progress_line(page: Page) -> str:
    """Returns the line of the progress. It is empty where no worker reports: before the first step, after the end, and
    in restart mode."""
    now = page["progress"]
    parts = []
    if now["step"]:
        total = f" of {now['total']} ({now['step'] / now['total']:.0%})" if now["total"] else ""
        parts.append(f"step {now['step']}{total}")
    if now["steps_per_s"]:
        parts.append(f"{now['steps_per_s']:.3g} steps/s")
    if now["samples_per_s"]:
        parts.append(f"{now['samples_per_s']:.3g} samples/s")
    if now["eta_s"] is not None:
        parts.append(f"{duration(now['eta_s'])} left")
    parts += [f"mean {name} {value:.4g}" for name, value in list(page["metrics"].items())[:_MOST_METRICS]]
    return "  ".join(parts)


def goodput_line(page: Page) -> str:
    """Returns the line of the goodput; empty before any time is accounted for."""
    goodput = page["goodput"]
    if not goodput["parts"]:
        return ""
    share = "" if goodput["share"] is None else f" {goodput['share']:.1%}"
    parts = [
        f"{p['name']} {duration(p['seconds'])}" for p in goodput["parts"] if p["seconds"] >= _SHORTEST_SHOWN_S
    ]
    computing = goodput["computing_share"]
    waits = (
        ""
        if computing is None
        else f"; in steps {computing:.0%} computing, {1 - computing:.0%} waiting for others"
    )
    return f"goodput{share}: " + ", ".join(parts) + waits


def whole(page: Page) -> list[str]:
    """Returns all lines, for a file or a pipe."""
    return screen(page, _WIDTH, sys.maxsize)


def screen(page: Page, columns: int, lines: int) -> list[str]:
    """Returns at most `lines` lines of at most `columns` characters, without colours. Sentences wrap, tables are
    cut."""
    said, now = page["verdict"], page["progress"]
    at = time_of_day(page["at"])
    head = [
        f"job {page['job']}  generation {now['generation']}  {at}",
        f"[{_MARKS[said['level']]}] {said['what']}",
        *(f"     {text}" for text in (said["why"], said["next"] and f"-> {said['next']}") if text),
        *filter(None, [progress_line(page), goodput_line(page)]),
    ]
    changes = [
        f"{time_of_day(g['at'])}  generation {g['number']} ({g['kind']})"
        f"{', cost ' + duration(g['cost_s']) if g['cost_s'] else ''}: {g['text']}"
        for g in page["generations"][-3:]
    ]
    tables = ["", *_nodes(page), "", *_workers(page), ""]
    shown = [
        *_wrapped(head, columns),
        *(plain_line(line)[:columns] for line in tables),
        *_wrapped(changes, columns),
    ]
    if len(shown) > lines:
        left_out = len(shown) - lines + 1
        shown = [
            *shown[: lines - 1],
            f"... {left_out} more lines: enlarge the terminal, or use --dashboard"[:columns],
        ]
    return shown


def _wrapped(sentences: Sequence[str], columns: int) -> list[str]:
    wrapper = textwrap.TextWrapper(
        columns, subsequent_indent=_CONTINUED[: columns // 4], drop_whitespace=False
    )
    return [line.rstrip() for sentence in sentences for line in wrapper.wrap(plain_line(sentence))]


def _nodes(page: Page) -> list[str]:
    rows = [
        (
            node["name"] + ("*" if node["leads"] else ""),
            node["state"],
            ", ".join(map(str, node["ranks"])) or "-",
            "answers" if node["etcd"] else "away",
        )
        for node in page["nodes"]
    ]
    return _table(("NODE", "STATE", "RANKS", "ETCD"), rows)


def _workers(page: Page) -> list[str]:
    rows = [
        (
            "-" if worker["rank"] is None else str(worker["rank"]),
            worker["node"],
            str(worker["slot"]),
            "-" if worker["step"] is None else str(worker["step"]),
            _or_dash(worker["computing_s"]),
            _or_dash(worker["heal_s"] or None),
        )
        for worker in page["workers"]
    ]
    return _table(("RANK", "NODE", "SLOT", "STEP", "COMPUTING", "HEALING"), rows)


def _or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
