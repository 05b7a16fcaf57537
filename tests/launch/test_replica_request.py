"""Valid sizes of replicas, and the refusals of numbers of nodes that never all have a part of one."""

from __future__ import annotations

import pytest

from bagua_agent.cluster.cluster_records import read_submission
from bagua_agent.config.job_config import JobConfig, workers_of_a_replica
from bagua_agent.config.job_config_file import SUBMITTED, decode
from bagua_contract import cluster_pb2 as pb
from bagua_launch.cluster_request import parse_submission
from bagua_launch.errors import RequestError
from bagua_launch.job_request import parse_request
from bagua_launch.written_values import WrittenValue


def config_of(**values: str) -> JobConfig:
    said = {key: WrittenValue(text, "--" + key.replace("_", "-")) for key, text in values.items()}
    return parse_request(said, ["train.py"]).config


def refusal_of(**values: str) -> str:
    with pytest.raises(RequestError) as error:
        config_of(**values)
    return str(error.value)


def test_a_replica_is_of_a_number_of_workers_or_of_a_node_s() -> None:
    assert config_of().replica_size == 1
    assert config_of(replica_size="4", nproc_per_node="2", nnodes="2:8").replica_size == 4
    node = config_of(replica_size="node", nproc_per_node="3")
    assert (node.replica_size, workers_of_a_replica(node)) == (0, 3)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"replica_size": "0"}, "'0': not a number of workers; use a number from 1 on, or node"),
        ({"replica_size": "all"}, "'all': not a number of workers"),
        (
            {"replica_size": "2"},
            "1 node with 1 worker each (the least of --nnodes) hold no replica; use at least 2 nodes",
        ),
        (
            {"replica_size": "2", "nnodes": "3:6"},
            "3 nodes with 1 worker each (the least of --nnodes) hold replicas on 2 nodes only; use at least 4 nodes",
        ),
        (
            {"replica_size": "4", "nnodes": "2:4", "sizes": "2,3,4", "nproc_per_node": "2"},
            "3 nodes with 2 workers each (one of --sizes) hold replicas on 2 nodes only",
        ),
        (
            {"replica_size": "2", "nnodes": "2:5", "start_size": "5"},
            "5 nodes with 1 worker each (--start-size) hold replicas on 4 nodes only",
        ),
    ],
)
def test_a_number_of_nodes_that_never_all_have_a_part_of_a_replica_is_refused(
    values: dict[str, str], says: str
) -> None:
    assert says in refusal_of(**values)


@pytest.mark.parametrize(
    ("replica_size", "slots", "nodes"),
    [("2", "2", "1:3"), ("2", "3", "1:3"), ("3", "2", "3:6"), ("2", "1", "2:5")],
)
def test_slots_that_no_replica_can_use_are_spares(replica_size: str, slots: str, nodes: str) -> None:
    assert config_of(replica_size=replica_size, nproc_per_node=slots, nnodes=nodes).slots == int(slots)


def submission_of(**values: str) -> pb.Submission:
    said = {key: WrittenValue(text, "--" + key.replace("_", "-")) for key, text in values.items()}
    return parse_submission(said, ["train.py"], directory="/jobs", environ={}, submitter="me", now_unix_s=1.0)


def sizes_of(made: pb.Submission) -> list[int]:
    """The numbers of nodes that the scheduler may give the job; the first few of many."""
    view = read_submission(made.SerializeToString(), made.job_id)
    room = view.size_policy.room(view.min_nodes, view.max_nodes)
    return [n for n in range(1, min(room.most, 10) + 1) if room.next_above(n - 1) == n]


def test_a_job_of_a_cluster_gets_whole_groups_of_nodes() -> None:
    made = submission_of(replica_size="2", nproc_per_node="1", nnodes="2:6")
    assert sizes_of(made) == [2, 4, 6]
    assert decode(made.launch, SUBMITTED).replica_size == 2
    # two replicas of three workers on three nodes of two, one on two
    made = submission_of(replica_size="3", nproc_per_node="2", nnodes="2:6")
    assert sizes_of(made) == [2, 3, 5, 6]
    made = submission_of(replica_size="2", nproc_per_node="1", nnodes="2:99998")
    assert sizes_of(made)[:3] == [2, 4, 6]


@pytest.mark.parametrize(
    "values",
    [
        {"replica_size": "2", "nproc_per_node": "4", "nnodes": "1:8"},
        {"replica_size": "node", "nnodes": "1:8"},
        {"nnodes": "1:8"},
    ],
)
def test_a_job_whose_nodes_each_hold_replicas_may_have_any_number_of_them(values: dict[str, str]) -> None:
    made = submission_of(**values)
    assert sizes_of(made) == list(range(1, 9))
    assert decode(made.launch, SUBMITTED).replica_size == {"2": 2, "node": 0}.get(
        values.get("replica_size", ""), 1
    )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"replica_size": "2", "nnodes": "2:6"}, "how many workers a node has is not known"),
        ({"replica_size": "2", "nproc_per_node": "1", "nnodes": "2:5"}, "use --nnodes 2:4 with it"),
        ({"replica_size": "2", "nproc_per_node": "1", "nnodes": "3:6"}, "hold replicas on 2 nodes only"),
    ],
)
def test_a_submission_without_whole_groups_of_nodes_is_refused(values: dict[str, str], says: str) -> None:
    with pytest.raises(RequestError) as error:
        submission_of(**values)
    assert says in str(error.value)
