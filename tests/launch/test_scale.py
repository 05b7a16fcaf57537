"""`scale` against a real etcd: only desired state is written, and only of a job that runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.base.sizes import ANY_SIZE, SizePolicy
from bagua_agent.cluster.cluster_records import parse_submission, read_submission
from bagua_agent.cluster_client.cluster_requests import scale_submitted, submit
from bagua_agent.cluster_client.scale import ScaleChange, change_desired
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import JobConfig, StoreCredentials
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.job.create_or_join import ensure_job
from bagua_agent.service.config import agent_config
from bagua_agent.service.units.unit_request import unit_request
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import PROTOCOL_VERSION
from bagua_launch import cluster_request
from bagua_launch.written_values import WrittenValue
from tests.launch.launcher import Launcher

KEYS = JobKeys("demo")


@pytest.fixture
def store(etcd: EmbeddedEtcd) -> Iterator[Store]:
    """An empty one."""
    client = Store(store_config([etcd.endpoint], StoreCredentials()))
    client.delete_prefix("/")
    yield client
    client.close()


def begin(store: Store, job_id: str, min_nodes: int, max_nodes: int) -> None:
    keys = JobKeys(job_id)
    store.put(keys.spec, pb.JobSpec(protocol=PROTOCOL_VERSION, nonce="n").SerializeToString())
    store.put(keys.desired, pb.Desired(min_nodes=min_nodes, max_nodes=max_nodes).SerializeToString())


def desired(store: Store) -> tuple[int, int]:
    record = store.get(KEYS.desired)
    assert record is not None
    found = pb.Desired.FromString(record.value)
    return found.min_nodes, found.max_nodes


def test_from_the_command_line(launch: Launcher, etcd: EmbeddedEtcd, store: Store) -> None:
    begin(store, "demo", 1, 2)
    words = ("scale", "--rdzv-id", "demo")
    result = launch(*words, "2:4", env={"BAGUA_ETCD": etcd.endpoint})
    assert (result.exit_code, result.output) == (0, "job 'demo': 2:4 nodes, was 1:2\n")
    assert desired(store) == (2, 4)

    result = launch(*words, "--rdzv_endpoint", etcd.endpoint, "2:4")
    assert (result.exit_code, result.output) == (0, "job 'demo': 2:4 nodes, as before\n")


def test_an_unknown_job_names_those_there_are(launch: Launcher, etcd: EmbeddedEtcd, store: Store) -> None:
    env = {"BAGUA_ETCD": etcd.endpoint, "PET_RDZV_ID": "demo"}
    assert launch.refusal("scale", "2", env=env) == (
        "no job 'demo' in this etcd, nor any other; check --etcd"
    )
    begin(store, "b", 1, 1)
    begin(store, "a", 1, 1)
    assert launch.refusal("scale", "2", env=env) == "no job 'demo' in this etcd; there are 'a', 'b'"
    assert store.get(KEYS.desired) is None


def test_a_job_that_has_ended_is_left_alone(store: Store) -> None:
    begin(store, "demo", 1, 2)
    store.put(KEYS.result, pb.Result(outcome=pb.Result.SUCCEEDED).SerializeToString())
    with pytest.raises(UserError, match="job 'demo' has ended"):
        change_desired(store, "demo", 2, 2)
    assert desired(store) == (1, 2)


def test_a_broken_record_is_written_anew(store: Store) -> None:
    begin(store, "demo", 1, 2)
    store.put(KEYS.desired, b"\xff\xff\xff")
    assert change_desired(store, "demo", 2, 3) == ScaleChange("demo", None, (2, 3))
    assert desired(store) == (2, 3)


def test_an_etcd_that_is_away_is_one_line_and_exit_code_1(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bagua_agent.cluster_client.scale._CONNECT_TIMEOUT_S", 0.3)
    result = launch("scale", "--rdzv-id", "a", "--rdzv-endpoint", "127.0.0.1:1", "2")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1 and "127.0.0.1:1" in result.stderr


def test_a_password_comes_from_its_file(launch: Launcher) -> None:
    path = launch.directory / "password"
    path.write_text("secret\n")
    config = store_config(["e1"], StoreCredentials(user="u", password_file=str(path)))
    assert (config.user, config.password) == ("u", "secret")
    path.write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        store_config(["e1"], StoreCredentials(user="u", password_file=str(path)))


def test_only_allowed_sizes(store: Store) -> None:
    begin(store, "demo", 2, 4)
    sizes = pb.SizePolicy(sizes=[2, 4, 8])
    store.put(
        KEYS.spec, pb.JobSpec(protocol=PROTOCOL_VERSION, nonce="n", size_policy=sizes).SerializeToString()
    )
    for nodes in ((2, 3), (3, 8)):
        with pytest.raises(
            UserError, match="can't be scaled to 3 nodes: not an allowed size; use sizes among 2, 4, 8"
        ):
            change_desired(store, "demo", *nodes)
    assert desired(store) == (2, 4), "what is refused changes nothing"
    change_desired(store, "demo", 2, 8)
    assert desired(store) == (2, 8)


def test_a_submitted_job_of_sizes_takes_them_to_its_nodes_and_is_scaled_among_them(
    store: Store,
) -> None:
    asked = {"name": "demo", "nnodes": "2:8", "sizes": "2,4,8", "start_size": "4", "cooldown": "30"}
    said = {key: WrittenValue(text, "--" + key.replace("_", "-")) for key, text in asked.items()}
    submission = cluster_request.parse_submission(
        said, ("train.py",), directory="/data", environ={}, submitter="ann", now_unix_s=1.0
    )
    submit(store, submission)
    with pytest.raises(UserError, match="can't be scaled to 3 nodes: not an allowed size"):
        scale_submitted(store, "demo", 2, 3)
    assert scale_submitted(store, "demo", 2, 4) == (2, 8)
    made = unit_config(store)
    assert (made.size_policy, made.max_nodes) == (SizePolicy((2, 4, 8), 4, 30.0), 4)


def unit_config(store: Store) -> JobConfig:
    """With which a daemon starts its unit now."""
    found = store.get(cluster_keys.submission("demo"))
    assert found is not None
    nodes_config = {"insecure": True, "etcd": {"endpoints": ["127.0.0.1:2379"]}, "node": {"slots": 1}}
    agent = agent_config.check(nodes_config, "test", "n0")
    return unit_request(parse_submission(found.value, "demo"), (0,), agent, have_gpus=False).config


def submit_nodes(store: Store, nodes: str) -> None:
    said = {"name": WrittenValue("demo", "--name"), "nnodes": WrittenValue(nodes, "--nnodes")}
    submission = cluster_request.parse_submission(
        said, ("train.py",), directory="/data", environ={}, submitter="ann", now_unix_s=1.0
    )
    submit(store, submission)


def test_a_job_that_is_scaled_while_its_first_unit_starts_begins_scaled(store: Store) -> None:
    submit_nodes(store, "2:2")
    config = unit_config(store)
    assert scale_submitted(store, "demo", 2, 4) == (2, 2)
    ensure_job(store, KEYS, config)
    assert desired(store) == (2, 4)


class ScaledBehindTheRead(Store):
    """The job is scaled behind the first read of what there is of it."""

    is_scaled = False

    def get_and_count(
        self, keys: Sequence[str], prefix: str, timeout_s: float | None = None
    ) -> tuple[dict[str, KeyValue], int]:
        found = super().get_and_count(keys, prefix, timeout_s)
        if not self.is_scaled:
            self.is_scaled = True
            assert scale_submitted(self, "demo", 3, 5) == (2, 2)
        return found


def test_a_job_that_is_scaled_while_its_first_agent_writes_it_begins_scaled(store: Store) -> None:
    submit_nodes(store, "2:2")
    meddled = ScaledBehindTheRead(store.config)
    ensure_job(meddled, KEYS, unit_config(store))
    assert meddled.is_scaled and desired(store) == (3, 5)
    meddled.close()


@pytest.mark.parametrize("other", [None, b"\xff\xff"])
def test_a_submission_that_is_lost_or_broken_keeps_no_unit_from_beginning(
    store: Store, other: bytes | None
) -> None:
    submit_nodes(store, "2:3")
    config = unit_config(store)
    store.delete(cluster_keys.submission("demo"))
    if other is not None:
        store.put(cluster_keys.submission("demo"), other)
    ensure_job(store, KEYS, config)
    assert desired(store) == (2, 3)


def test_a_later_submission_of_the_name_says_nothing_of_an_earlier_unit(store: Store) -> None:
    submit_nodes(store, "2:3")
    config = unit_config(store)
    store.delete(cluster_keys.submission("demo"))
    submit_nodes(store, "5:6")
    ensure_job(store, KEYS, config)
    assert desired(store) == (2, 3)


def submit_replicas(store: Store, **more: str) -> None:
    asked = {"name": "demo", "replica_size": "2", "nproc_per_node": "1", "nnodes": "2", **more}
    said = {key: WrittenValue(text, "--" + key.replace("_", "-")) for key, text in asked.items()}
    submission = cluster_request.parse_submission(
        said, ("train.py",), directory="/data", environ={}, submitter="ann", now_unix_s=1.0
    )
    submit(store, submission)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ((1, 1), "1 node with 1 worker each hold no replica of 2 workers; use at least 2 nodes"),
        ((1, 4), "1 node with 1 worker each hold no replica of 2 workers; use at least 2 nodes"),
        (
            (2, 5),
            "5 nodes with 1 worker each hold replicas of 2 workers on 4 nodes only; use 4 or 6 nodes",
        ),
        (
            (3, 4),
            "3 nodes with 1 worker each hold replicas of 2 workers on 2 nodes only; use 2 or 4 nodes",
        ),
    ],
)
def test_a_submitted_job_keeps_whole_replicas(store: Store, nodes: tuple[int, int], says: str) -> None:
    submit_replicas(store)
    with pytest.raises(UserError, match=f"job 'demo' can't be scaled: {says}$"):
        scale_submitted(store, "demo", *nodes)
    assert scale_submitted(store, "demo", 2, 6) == (2, 2), "what is refused changes nothing"


@pytest.mark.parametrize("nodes", ["2", "2:4"])
def test_a_submitted_job_of_groups_keeps_them_when_it_is_scaled_up(store: Store, nodes: str) -> None:
    submit_replicas(store, nnodes=nodes)
    assert scale_submitted(store, "demo", 2, 8) is not None
    found = store.get(cluster_keys.submission("demo"))
    assert found is not None
    view = read_submission(found.value, "demo")
    room = view.size_policy.room(view.min_nodes, view.max_nodes)
    assert [room.fit(n) for n in range(2, 10)] == [2, 2, 4, 4, 6, 6, 8, 8]
    assert unit_config(store).size_policy == ANY_SIZE, "the job's leader counts the replicas themselves"


def test_a_submission_that_lists_the_sizes_of_its_groups_is_scaled_among_them(store: Store) -> None:
    """As submissions of earlier versions do."""
    submit_replicas(store, nnodes="2:8", sizes="2,4,8")
    with pytest.raises(UserError, match="can't be scaled to 6 nodes: not an allowed size"):
        scale_submitted(store, "demo", 2, 6)
    assert scale_submitted(store, "demo", 2, 4) == (2, 8)


def test_replicas_on_one_node_allow_every_number(store: Store) -> None:
    submit_replicas(store, nproc_per_node="4")
    assert scale_submitted(store, "demo", 1, 3) == (2, 2)


def begin_replicas(store: Store, replica_size: int, *slots: int) -> None:
    begin(store, "demo", 2, 2)
    spec = pb.JobSpec(protocol=PROTOCOL_VERSION, nonce="n", replica_size=replica_size)
    store.put(KEYS.spec, spec.SerializeToString())
    for number, of_node in enumerate(slots):
        store.put(
            KEYS.agent(f"a{number}"), pb.Agent(agent_id=f"a{number}", slots=of_node).SerializeToString()
        )


def test_a_job_started_by_hand_keeps_whole_replicas(store: Store) -> None:
    begin_replicas(store, 2, 1, 1)
    store.put(KEYS.agent("odd"), b"\xff\xff")
    with pytest.raises(UserError, match="1 node with 1 worker each hold no replica of 2 workers"):
        change_desired(store, "demo", 1, 1)
    with pytest.raises(UserError, match="use 2 or 4 nodes"):
        change_desired(store, "demo", 3, 6)
    assert desired(store) == (2, 2)
    change_desired(store, "demo", 2, 5)  # its fifth node is a spare, as with --nnodes 2:5
    assert desired(store) == (2, 5)


def test_nodes_of_different_sizes_are_refused_only_where_the_largest_hold_no_replica(store: Store) -> None:
    begin_replicas(store, 3, 1, 2)
    with pytest.raises(UserError, match="1 node with 2 workers each hold no replica of 3 workers"):
        change_desired(store, "demo", 1, 1)
    change_desired(store, "demo", 4, 4)
    store.delete_prefix(KEYS.agents)
    change_desired(store, "demo", 1, 1)  # the size of its nodes is not known
    assert desired(store) == (1, 1)
