"""The README's plot shows the medians of the kept result."""

import json
import re

import pytest

from benchmarks import rescale_plot
from benchmarks.result_file import RESULTS, ROOT


def test_its_values_are_those_of_the_kept_table() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"results/(rescale-[0-9-]*[0-9])-changes\.png", readme)
    assert shown is not None
    table = (RESULTS / f"{shown[1]}.md").read_text()
    header, _, *rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    columns = {
        "a host is killed": "host killed",
        "a host's link is cut": "link cut",
        "a host joins": "survivors' pause",
    }
    values = rescale_plot.medians(json.loads((RESULTS / f"{shown[1]}.json").read_text())["values"])
    cells = {
        (row[0], plotted): row[header.index(column)] for row in rows for plotted, column in columns.items()
    }
    assert cells.keys() == values.keys()
    for key, cell in cells.items():
        if cell == "-":
            assert values[key] is None
        else:
            assert values[key] == pytest.approx(float(cell.split()[0]), abs=0.006)


def test_a_bar_that_was_not_measured_is_named() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    values = {(system, row): None for system in rescale_plot.SYSTEMS for row in rescale_plot.ROWS}
    figure = rescale_plot.draw(pyplot, values)
    texts = [text.get_text() for text in figure.axes[0].texts]
    pyplot.close(figure)
    assert texts == [f"{system}: not measured" for system in rescale_plot.SYSTEMS for _ in rescale_plot.ROWS]
