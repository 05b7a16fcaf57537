"""The whole table: every fault strikes while a process is held at each named point of the protocol.

A job suffers many cells in succession, and in the end everything promised must be true of it. The short form is a
seeded choice that has every row, and every point; the long form is all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from tests.faults import fault_table as table
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.fault_stage import NODES, Stage
from tests.faults.fault_strikes import strike
from tests.faults.fault_table import CELLS, EXCLUSIONS, MOMENTS, POINTS, ROWS, Cell

SEED = 1
JOBS_A_ROW = 3


def jobs_of_all_rows() -> dict[str, list[Cell]]:
    """By name, what each job suffers."""
    return {
        f"{row.name.replace(' ', '-')}-{number}": cells
        for row in ROWS
        for number, cells in enumerate(table.in_jobs(table.cells_of(row), JOBS_A_ROW))
    }


def jobs_of_the_diagonal() -> dict[str, list[Cell]]:
    return {str(number): cells for number, cells in enumerate(table.in_jobs(table.diagonal(SEED), 1))}


def suffer_all(job: MakeJob, make_lab: MakeLab, cells: Sequence[Cell]) -> None:
    stage = Stage(job, make_lab(1 + NODES), cells)
    stage.begin()
    for cell in cells:
        print(f"struck: {cell}")
        suffer(stage, cell)
    if not cells[-1].ends_the_job:
        stage.finish()
    stage.check()


def suffer(stage: Stage, cell: Cell) -> None:
    """Bring a process to the point, strike, and wait until the job is whole again; or until all have ended."""
    row, moment = cell.row, cell.moment
    if row is table.BELOW_MINIMUM:
        stage.job.scale(stage.hosts[0], f"{NODES}:{NODES}")
    held = stage.bring(moment, the_leader=row is table.LEADER_LOST)
    lost, before = stage.steps_lost(), stage.generation()
    since = strike(stage, row, moment, held)
    if cell.ends_the_job:
        stage.await_the_end()
        return
    stage.start_missing()
    if row is table.BELOW_MINIMUM:
        since = stage.await_all_nodes(before)
    stage.await_whole(since)
    gap_s = max(b - a for a, b in pairwise([since, *stage.commits.after(since)]))
    stage.job.measured(str(cell), gap_s, cell.bound_s)
    if row.no_step_missed and moment.occasion not in table.STALLING:
        assert stage.steps_lost() == lost, f"{cell}: no step is missed"
    if row is table.ETCD_MEMBER_KILLED:
        stage.cluster.restart()
    if row is table.BELOW_MINIMUM:
        stage.job.scale(stage.hosts[0], f"1:{NODES}")


def test_every_point_is_in_the_table_and_every_cell_is_run_or_has_its_reason() -> None:
    assert {moment.point for moment in MOMENTS} == POINTS
    assert len({str(moment) for moment in MOMENTS}) == len(MOMENTS)
    for exclusion in EXCLUSIONS:
        assert exclusion.reason
        for row in exclusion.rows:
            assert any(exclusion.covers(moment) for moment in MOMENTS), exclusion.reason
            assert table.cells_of(row)
    run = [cell for cells in jobs_of_all_rows().values() for cell in cells]
    assert sorted(map(str, run)) == sorted(map(str, CELLS)), "the long form is all of it"
    excluded = [(row, moment) for row in ROWS for moment in MOMENTS if table.why_not(row, moment)]
    assert len(run) + len(excluded) == len(ROWS) * len(MOMENTS)


def test_the_short_form_has_every_row_and_every_point() -> None:
    cells = table.diagonal(SEED)
    assert {cell.row for cell in cells} == set(ROWS)
    assert sorted(cell.moment.point for cell in cells) == sorted(POINTS)
    assert cells == table.diagonal(SEED), "the same each time"


@pytest.mark.long
@pytest.mark.parametrize("name", jobs_of_the_diagonal())
def test_a_choice_of_faults_each_at_its_point(job: MakeJob, make_lab: MakeLab, name: str) -> None:
    suffer_all(job, make_lab, jobs_of_the_diagonal()[name])


@pytest.mark.long
@pytest.mark.parametrize("name", jobs_of_all_rows())
def test_a_fault_at_every_point(job: MakeJob, make_lab: MakeLab, name: str) -> None:
    suffer_all(job, make_lab, jobs_of_all_rows()[name])
