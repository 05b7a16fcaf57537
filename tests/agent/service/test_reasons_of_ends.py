"""A job that can't run here is refused once, or ends, with the reason in the record that people see."""

from __future__ import annotations

from pathlib import Path

from bagua_agent.cluster.cluster_records import PROTOCOL, write_orders
from bagua_agent.cluster.cluster_view import OrderView, UnitState
from bagua_agent.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.job_file import SUBMITTED, encode
from bagua_agent.service.child_units import ChildUnits
from bagua_agent.service.units import FoundUnit, units_folder
from bagua_agent.store import cluster_keys
from bagua_agent.store.client import Store
from bagua_agent.store.embedded import EmbeddedEtcd
from bagua_contract import cluster_pb2 as pb
from tests.agent.service.daemon_here import NODE, config_of, running_daemon
from tests.lab.wait import eventually

DEADLINE_S = 40.0


class NeverStarted:
    def found(self) -> list[FoundUnit]:
        return []

    def start(self, job_id: str, folder: Path) -> None:
        raise AssertionError("the kernel would refuse it at every try")


def order_job(store: Store, directory: Path, *arguments: str) -> None:
    command = WorkerCommand(CommandKind.SCRIPT, "missing.py", arguments)
    submission = pb.Submission(
        protocol=PROTOCOL,
        job_id="job",
        wanted=pb.Submission.RUN,
        min_nodes=1,
        max_nodes=1,
        user="root",
        directory=str(directory),
        launch=encode(JobConfig(command=command, job_id="job"), SUBMITTED),
    )
    store.put(cluster_keys.submission("job"), submission.SerializeToString())
    store.put(cluster_keys.orders(NODE), write_orders([OrderView("job", 1, 1)]))


def told_unit(store: Store) -> pb.Unit:
    found = store.get(cluster_keys.node(NODE))
    units = pb.Node.FromString(found.value).units if found is not None else ()
    return units[0] if units else pb.Unit()


def test_an_argument_that_no_program_can_be_given(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    order_job(plain_store, tmp_path, "x" * 1_000_000)
    with running_daemon(plain_etcd, plain_store, tmp_path, units=NeverStarted()) as said:
        eventually(
            lambda: told_unit(plain_store).state == UnitState.REFUSED.value,
            DEADLINE_S,
            lambda: f"a refusal; said {said}",
            0.02,
        )
        reason = told_unit(plain_store).reason
    assert "argument 1 has 1000000 bytes, more than the 131071" in reason
    assert len([line for line in said if "is refused here" in line]) == 1


def test_an_agent_that_ends_with_an_error_says_which(
    plain_etcd: EmbeddedEtcd, plain_store: Store, tmp_path: Path
) -> None:
    order_job(plain_store, tmp_path)
    units = ChildUnits(units_folder(config_of(plain_etcd, tmp_path).directories_state))
    (tmp_path / "log").mkdir()
    with running_daemon(plain_etcd, plain_store, tmp_path, units=units) as said:
        eventually(
            lambda: told_unit(plain_store).failures > 0, DEADLINE_S, lambda: f"its end; said {said}", 0.05
        )
        reason = told_unit(plain_store).reason
    assert f"its agent ended with 2: script 'missing.py' does not exist in {tmp_path}" in reason
    for unit in units.found():
        units.kill(unit.job_id)
