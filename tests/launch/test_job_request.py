"""Valid requests for a job, and the one-line error of each invalid one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bagua_agent.base.sizes import ANY_SIZE, SizePolicy
from bagua_agent.config.job_config import CommandKind, JobConfig, StoreCredentials, WorkerCommand
from bagua_agent.membership.policy import Policy
from bagua_launch.errors import RequestError
from bagua_launch.job_request import JobRequest, parse_request, parse_scale
from bagua_launch.node_facts import ThisNode
from bagua_launch.written_values import WrittenValue


@dataclass(frozen=True)
class Node:
    """A node that has what a test says."""

    gpus: int = 0
    cpus: int = 4
    addresses: frozenset[str] = frozenset({"localhost"})
    ignored: frozenset[str] = frozenset()

    def gpu_count(self) -> int:
        return self.gpus

    def cpu_count(self) -> int:
        return self.cpus

    def owns_address(self, host: str) -> bool:
        return host in self.addresses

    def ignores(self, signal_name: str) -> bool:
        return signal_name in self.ignored


def asked(node: Node | None = None, program: tuple[str, ...] = ("train.py",), /, **values: str) -> JobRequest:
    said = {key: WrittenValue(text, "--" + key.replace("_", "-")) for key, text in values.items()}
    return parse_request(said, program, node or Node())


def config(node: Node | None = None, /, **values: str) -> JobConfig:
    return asked(node, **values).config


def refusal(node: Node | None = None, /, **values: str) -> str:
    with pytest.raises(RequestError) as error:
        asked(node, **values)
    return str(error.value)


def test_options_not_given_have_the_defaults_of_the_config() -> None:
    request = asked()
    plain = JobConfig(job_id=request.config.job_id, command=WorkerCommand(CommandKind.SCRIPT, "train.py"))
    assert request == JobRequest(plain, ())
    assert request.config.job_id != asked().config.job_id, "no other node has to name it, so it is fresh"


@pytest.mark.parametrize(
    ("text", "pair"),
    [("1", (1, 1)), ("4", (4, 4)), ("2:8", (2, 8)), ("3:3", (3, 3)), ("1:10000", (1, 10000))],
)
def test_nnodes(text: str, pair: tuple[int, int]) -> None:
    made = config(nnodes=text)
    assert (made.min_nodes, made.max_nodes) == pair


@pytest.mark.parametrize(
    "text", ["", "0", "0:2", "3:2", "-1", "a", "2:", ":2", "1:2:3", "2.5", "２", " 2", "9" * 30]
)
def test_nnodes_refused(text: str) -> None:
    line = refusal(nnodes=text)
    assert line.startswith(f"--nnodes {text!r}: ") and "; use " in line


def test_nnodes_the_wrong_way_round_is_turned() -> None:
    assert refusal(nnodes="3:2") == "--nnodes '3:2': the least is more than the most; use MIN:MAX such as 2:3"


@pytest.mark.parametrize(
    ("text", "gpus", "slots"),
    [("3", 8, 3), ("cpu", 8, 4), ("gpu", 8, 8), ("auto", 8, 8), ("auto", 0, 4), ("1", 0, 1)],
)
def test_workers_on_a_node(text: str, gpus: int, slots: int) -> None:
    assert config(Node(gpus=gpus), nproc_per_node=text).slots == slots


@pytest.mark.parametrize("text", ["0", "-1", "gpus", "", "1.5", "1e3"])
def test_workers_refused(text: str) -> None:
    assert refusal(nproc_per_node=text) == (
        f"--nproc-per-node {text!r}: not a number of workers; use a number from 1 on, auto, cpu or gpu"
    )


def test_gpu_without_a_gpu_is_refused() -> None:
    assert refusal(nproc_per_node="gpu") == (
        "--nproc-per-node 'gpu': no GPU is visible on this node; use a number, cpu or auto"
    )


def test_waits() -> None:
    made = config(rdzv_conf="join_timeout=5, lease_ttl=2.5,below_minimum_timeout=60,holder_timeout=none")
    waits = (made.join_timeout_s, made.lease_ttl_s, made.below_minimum_timeout_s, made.holder_timeout_s)
    assert waits == (5.0, 2.5, 60.0, None)
    assert made.probe_window_s == JobConfig("x", made.command).probe_window_s


def test_every_wait_of_the_config_has_a_key() -> None:
    keys = ["join_timeout", "last_call_timeout", "node_window", "lease_ttl", "probe_window"]
    keys += ["below_minimum_timeout", "holder_timeout", "hang_notice", "hang_renew"]
    made = config(rdzv_conf=",".join(f"{key}=7" for key in keys))
    assert {
        made.join_timeout_s, made.last_call_s, made.node_window_s, made.lease_ttl_s,
        made.probe_window_s, made.below_minimum_timeout_s, made.holder_timeout_s,
        made.hang_notice_s, made.hang_renew_s,
    } == {7.0}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "join_time=3",
            "unknown key 'join_time'; use join_timeout, timeout, last_call_timeout, node_window, lease_ttl, "
            "probe_window, below_minimum_timeout, holder_timeout, hang_notice, hang_renew, is_host",
        ),
        ("is_host=maybe", "is_host 'maybe' is neither yes nor no; use is_host=1 or is_host=0"),
        ("is_host=2", "is_host '2' is neither yes nor no; use is_host=1 or is_host=0"),
        ("join_timeout", "'join_timeout' is not KEY=VALUE; use key=value,key=value"),
        ("join_timeout=", "'join_timeout=' is not KEY=VALUE; use key=value,key=value"),
        ("lease_ttl=1", "lease_ttl '1' is out of range; use lease_ttl=SECONDS, at least 2"),
        ("lease_ttl=none", "lease_ttl 'none' is not a number; use lease_ttl=SECONDS, at least 2"),
        ("probe_window=nan", "probe_window 'nan' is out of range; use probe_window=SECONDS, more than 0"),
        (
            "join_timeout=-1",
            "join_timeout '-1' is out of range; use join_timeout=SECONDS, more than 0, or none",
        ),
    ],
)
def test_waits_refused(text: str, line: str) -> None:
    assert refusal(rdzv_conf=text) == f"--rdzv-conf {text!r}: {line}"


def test_keys_of_torchrun_without_meaning_here_are_taken_with_a_note() -> None:
    assert asked(rdzv_conf="read_timeout=60,use_libuv=1").notes == (
        "accepted for compatibility, ignored: --rdzv-conf read_timeout, --rdzv-conf use_libuv",
    )


def test_endpoints() -> None:
    made = config(rdzv_endpoint="e1,e2:4001,[::1]:5", rdzv_id="demo")
    assert made.endpoints == ("e1:2379", "e2:4001", "[::1]:5")
    assert (made.job_id, made.hosts_store) == ("demo", False)


def test_no_endpoint_leaves_it_to_the_agent() -> None:
    made = config(nnodes="2:4")
    assert made.endpoints is None and not made.hosts_store


@pytest.mark.parametrize("text", ["", "e1:x", "e1:0", "a,,b", "ftp://e1", "::1"])
def test_endpoints_refused(text: str) -> None:
    assert refusal(rdzv_endpoint=text).startswith("--rdzv-endpoint: ")


@pytest.mark.parametrize("text", ["", "a/b", "..", "a b", "x" * 200, "a\nb"])
def test_job_id_refused(text: str) -> None:
    assert "id" in refusal(rdzv_id=text, rdzv_endpoint="e1")


def test_several_nodes_without_an_id_share_the_one_of_torchrun() -> None:
    request = asked(nnodes="2", rdzv_endpoint="e1")
    assert request.config.job_id == "none"
    assert request.notes == (
        "no --rdzv-id: the job is called 'none'; jobs that share an etcd need ids of their own",
    )


@pytest.mark.parametrize(("own", "who"), [(True, "this node starts"), (False, "another node starts")])
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_torchruns_own_store_becomes_an_etcd_at_its_place(backend: str, own: bool, who: str) -> None:
    node = Node(addresses=frozenset({"node-0"} if own else ()))
    request = asked(node, nnodes="2", rdzv_backend=backend, rdzv_endpoint="node-0:29400", rdzv_id="a")
    assert (request.config.endpoints, request.config.hosts_store) == (("node-0:29400",), own)
    assert request.notes == (
        f"--rdzv-backend {backend}: the agents meet in an etcd that {who} at node-0:29400",
    )


@pytest.mark.parametrize(
    ("said", "hosts"), [("1", True), ("True", True), ("y", True), ("0", False), ("F", False)]
)
@pytest.mark.parametrize("owns", [True, False])
def test_is_host_says_which_node_hosts_the_store_of_c10d(said: str, hosts: bool, owns: bool) -> None:
    node = Node(addresses=frozenset({"svc"} if owns else ()))
    conf, who = f"is_host={said}", "this node starts" if hosts else "another node starts"
    request = asked(
        node, nnodes="2", rdzv_backend="c10d", rdzv_endpoint="svc:29400", rdzv_id="a", rdzv_conf=conf
    )
    assert (request.config.endpoints, request.config.hosts_store) == (("svc:29400",), hosts)
    note = f"--rdzv-backend c10d: the agents meet in an etcd that {who} at svc:29400"
    assert request.notes[0].startswith(note) and len(request.notes) == 1
    assert ("is no address of this node" in request.notes[0]) == (hosts and not owns)


@pytest.mark.parametrize(
    "place",
    [
        {"rdzv_backend": "static", "rdzv_endpoint": "svc:1"},
        {"rdzv_endpoint": "svc:1"},
        {"rdzv_backend": "c10d", "rdzv_endpoint": "e1,e2"},
        {"rdzv_backend": "c10d", "rdzv_endpoint": "svc:0", "nnodes": "1"},
        {"standalone": "1", "nnodes": "1"},
        {"nnodes": "1"},
    ],
)
def test_elsewhere_is_host_has_no_effect_and_a_note_says_so(place: dict[str, str]) -> None:
    request = asked(**{"nnodes": "2", "rdzv_conf": "is_host=1", "rdzv_id": "a", **place})
    assert not request.config.hosts_store
    assert request.notes[-1] == "accepted for compatibility, ignored: --rdzv-conf is_host"


@pytest.mark.parametrize("node_rank", ["0", "1"])
def test_a_master_address_is_where_the_first_node_hosts_etcd(node_rank: str) -> None:
    request = asked(nnodes="2", master_addr="10.0.0.1", node_rank=node_rank, rdzv_id="a")
    assert request.config.endpoints == ("10.0.0.1:29501",)
    assert request.config.hosts_store is (node_rank == "0")
    # the port itself is the workers', as under torchrun
    assert (request.config.master_addr, request.config.master_port) == (None, 29500)
    last = asked(nnodes="2", master_addr="10.0.0.1", master_port="65535", node_rank=node_rank, rdzv_id="a")
    assert (last.config.endpoints, last.config.master_port) == (("10.0.0.1:65534",), 65535)


def test_a_master_address_of_one_node_is_the_workers() -> None:
    made = config(master_addr="127.0.0.1", master_port="29501")
    assert (made.endpoints, made.master_addr, made.master_port) == (None, "127.0.0.1", 29501)


def test_a_master_port_of_0_is_a_free_one_except_where_nodes_meet_beside_it() -> None:
    assert config(standalone="1", master_port="0").master_port == 0
    assert config(nnodes="2", rdzv_endpoint="e1:1", rdzv_id="a", master_port="0").master_port == 0
    met = refusal(nnodes="2", master_addr="10.0.0.1", master_port="0", node_rank="0", rdzv_id="a")
    assert met == (
        "--master-port '0': the nodes meet beside this port, so all must know it; use a number from 1 to 65535"
    )


def test_etcd_v2_is_etcd_with_a_note() -> None:
    request = asked(rdzv_backend="etcd-v2", rdzv_endpoint="e1:2379", rdzv_id="a")
    assert request.config.endpoints == ("e1:2379",) and not request.config.hosts_store
    assert request.notes == (
        "--rdzv-backend etcd-v2: the agents meet in the etcd at the endpoint, over its v3 interface",
    )


def test_an_unknown_backend_is_refused() -> None:
    assert refusal(rdzv_backend="mpi") == (
        "--rdzv-backend 'mpi': no such backend; use etcd or etcd-v2 or c10d or static"
    )


def test_standalone_ignores_the_rest_and_says_so() -> None:
    request = asked(standalone="true", rdzv_endpoint="e1:1", rdzv_id="a")
    assert request.config.endpoints is None and request.config.job_id != "a"
    assert request.notes == ("--standalone: --rdzv-endpoint is ignored", "--standalone: --rdzv-id is ignored")
    assert refusal(standalone="1", nnodes="2").startswith("--nnodes '2': --standalone is for one node; use ")
    assert config(standalone="0", rdzv_endpoint="e1").endpoints == ("e1:2379",)


@pytest.mark.parametrize(
    ("switches", "kind"),
    [
        ({}, CommandKind.SCRIPT),
        ({"module": "true"}, CommandKind.MODULE),
        ({"no_python": "1"}, CommandKind.EXECUTABLE),
        ({"run_path": "yes"}, CommandKind.RUN_PATH),
        ({"run_path": "on", "no_python": "true"}, CommandKind.RUN_PATH),
        ({"module": "false", "no_python": "0"}, CommandKind.SCRIPT),
    ],
)
def test_how_the_program_is_started(switches: dict[str, str], kind: CommandKind) -> None:
    request = asked(None, ("train", "--lr", "1"), **switches)
    assert request.config.command == WorkerCommand(kind, "train", ("--lr", "1"))


def test_switches_that_contradict_each_other() -> None:
    assert refusal(module="1", no_python="1").endswith("; use one of them")
    assert refusal(module="1", run_path="1").endswith("; use one of them")
    assert refusal(module="maybe") == "--module 'maybe': neither yes nor no; use 1 or 0"


def test_no_script() -> None:
    with pytest.raises(RequestError, match="no script; use bagua-launch"):
        parse_request({}, [], Node())


def test_plain_values_reach_the_config() -> None:
    made = config(
        nproc_per_node="4", max_restarts="3", role="trainer", start_method="fork", log_dir="logs",
        redirects="3",
        tee="0:1,3:2", local_ranks_filter="0,3", duplicate_stdout_filters="a,,b", local_addr="10.0.0.3",
        signals_to_handle="SIGTERM, SIGUSR1", shutdown_timeout="5", virtual_local_rank="1", ledger="books",
        digest_every="0", failpoints="heal=exit", node_rank="2",
        checkpoint_dir="saved", checkpoint_every="500", once="1",
    )  # fmt: skip
    assert made == JobConfig(
        made.job_id, made.command, slots=4, max_restarts=3, role="trainer", start_method="fork",
        log_dir="logs",
        redirects="3", tee="0:1,3:2", local_ranks_filter="0,3", duplicate_stdout_filters="a,,b",
        local_addr="10.0.0.3", signals_to_handle=("SIGTERM", "SIGUSR1"), shutdown_timeout_s=5.0,
        virtual_local_rank=True, ledger_dir="books", digest_every_steps=0, failpoints="heal=exit",
        node_rank=2, checkpoint_dir="saved",
        checkpoint_every="500", once=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("max_restarts", "-1"), ("max_restarts", "many"), ("role", " "), ("start_method", "thread"),
        ("shutdown_timeout", "-2"), ("shutdown_timeout", "inf"),
        ("signals_to_handle", "SIGNOPE"), ("signals_to_handle", "SIGKILL"), ("numa_binding", "cpu"),
        ("redirects", "4"), ("redirects", "0:1,"), ("tee", "a:1"), ("tee", "1:3"), ("redirects", "0:1,7:1"),
        ("local_ranks_filter", "0,1"), ("local_ranks_filter", "x"), ("master_port", "70000"),
        ("node_rank", "a"),
        ("digest_every", "x"), ("checkpoint_every", "5m"), ("checkpoint_every", "0"), ("checkpoint_dir", " "),
        ("checkpoint_dir", "sftp://host/x"), ("checkpoint_dir", "s3://"),
        ("virtual_local_rank", "perhaps"), ("log_dir", ""),
    ],
)  # fmt: skip
def test_plain_values_refused(key: str, text: str) -> None:
    flag = "--" + key.replace("_", "-")
    line = refusal(**{key: text})
    assert line.startswith(f"{flag} {text!r}: ") and "; use " in line and "\n" not in line


def test_a_deterministic_job_has_virtual_shards() -> None:
    assert config().virtual_shards == 0
    assert config(deterministic="1").virtual_shards == 8
    assert config(deterministic="1", virtual_shards="12").virtual_shards == 12
    assert refusal(virtual_shards="12") == (
        "--virtual-shards '12': only a deterministic job has virtual shards; use --deterministic with it"
    )
    for text in ("0", "5000"):
        assert refusal(deterministic="1", virtual_shards=text).endswith("; use 1 to 4096")
    assert refusal(deterministic="1", no_python="1").endswith("; use one of them")
    line = refusal(deterministic="1", replica_size="2", nproc_per_node="2")
    assert line.startswith("--deterministic with --replica-size 2: ") and line.endswith("; use one of them")


def test_options_without_effect_are_told_once() -> None:
    assert asked(event_log_handler="null", logs_specs="default", monitor_interval="5").notes == (
        "accepted for compatibility, ignored: --event-log-handler, --logs-specs, --monitor-interval",
    )
    assert asked(numa_binding="node", start_method="spawn").notes == ()


@pytest.mark.parametrize(
    ("key", "known"), [("logs_specs", "default"), ("event_log_handler", "null or console")]
)
def test_names_that_torch_would_look_up_are_refused(key: str, known: str) -> None:
    line = refusal(**{key: "DOESNOT_EXIST"})
    assert line.startswith(f"--{key.replace('_', '-')} 'DOESNOT_EXIST': no such choice; use {known}")


@pytest.mark.parametrize(
    "text",
    [
        "'join_timeout=5,node_window=1'",
        '"join_timeout=5","node_window=1"',
        "join_timeout='5', node_window='1'",
    ],
)
def test_quotes_in_rdzv_conf_are_no_part_of_it(text: str) -> None:
    made = config(rdzv_conf=text)
    assert (made.join_timeout_s, made.node_window_s) == (5.0, 1.0)


def test_port_0_on_one_node_is_a_store_of_its_own() -> None:
    request = asked(rdzv_backend="c10d", rdzv_endpoint="localhost:0", rdzv_id="one")
    assert request.config.endpoints is None and request.config.job_id == "one"
    assert request.notes == (
        "--rdzv-endpoint localhost:0: the workers of this node meet in an etcd that this node starts",
    )
    assert "port '0' is not a number" in refusal(rdzv_backend="c10d", rdzv_endpoint="localhost:0", nnodes="2")


def test_credentials() -> None:
    made = config(etcd_ca="ca", etcd_cert="c", etcd_key="k", etcd_user="u", etcd_password_file="p")
    assert made.store_credentials == StoreCredentials("ca", "c", "k", "u", "p")
    assert refusal(etcd_cert="c") == "--etcd-cert 'c': only one of a pair; use --etcd-key with it"
    assert refusal(etcd_user="u").endswith("use --etcd-password-file with it")
    assert refusal(rdzv_endpoint="https://e1").endswith("; use --etcd-ca FILE")


def test_scale() -> None:
    values = {"rdzv_endpoint": WrittenValue("e1", "BAGUA_ETCD"), "rdzv_id": WrittenValue("demo", "--rdzv-id")}
    request = parse_scale(values, ["2:4"])
    assert (request.endpoints, request.job_id, request.min_nodes, request.max_nodes) == (
        ("e1:2379",),
        "demo",
        2,
        4,
    )
    assert parse_scale(values, ["other", "3"]).job_id == "other"
    with pytest.raises(RequestError, match="which job has '2' nodes is missing; use scale JOB MIN:MAX"):
        parse_scale({"rdzv_endpoint": values["rdzv_endpoint"]}, ["2"])
    with pytest.raises(RequestError, match="'a b 2' is too much"):
        parse_scale(values, ["a", "b", "2"])
    with pytest.raises(RequestError, match="MIN:MAX '4:2': the least is more than the most"):
        parse_scale(values, ["4:2"])


def test_this_node_counts_visible_gpus_and_knows_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    node = ThisNode()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert node.gpu_count() == 0
    assert node.cpu_count() >= 1
    assert node.owns_address("127.0.0.1")
    assert not node.owns_address("192.0.2.1") and not node.owns_address("no-such-host.invalid")


def test_a_signal_that_is_ignored_at_the_start_is_handled_only_where_it_is_named() -> None:
    under_nohup = Node(ignored=frozenset({"SIGHUP"}))
    assert config(under_nohup).signals_to_handle == ("SIGTERM", "SIGINT", "SIGQUIT")
    assert config(under_nohup, signals_to_handle="SIGTERM,SIGHUP").signals_to_handle == ("SIGTERM", "SIGHUP")
    # a shell's script ignores these for what it starts in the background; Ctrl-C of --hosts comes as SIGINT
    in_the_background = Node(ignored=frozenset({"SIGINT", "SIGQUIT"}))
    assert config(in_the_background).signals_to_handle == ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def test_the_hang_timeout_is_seconds_or_never() -> None:
    assert config(hang_timeout="90").hang_timeout_s == 90.0
    assert config(hang_timeout="never").hang_timeout_s is None
    assert config().hang_timeout_s == Policy().hang_timeout_s
    for bad in ("0", "-1", "none", "inf"):
        assert refusal(hang_timeout=bad).startswith(f"--hang-timeout {bad!r}: ")


def test_sizes_are_ascending_numbers_of_nodes_with_both_ends_of_nnodes() -> None:
    policy = config(
        nnodes="2:8", sizes="8,2,4", start_size="4", cooldown="30", rdzv_endpoint="e:1", rdzv_id="j"
    ).size_policy
    assert policy == SizePolicy((2, 4, 8), 4, 30.0)
    assert config().size_policy == ANY_SIZE


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sizes": "2;4"}, "--sizes '2;4': no list of sizes; use numbers of nodes such as 2,4,8"),
        (
            {"sizes": "2,4"},
            "--sizes '2,4': the ends of --nnodes 2:8 are not both among them; use --nnodes 2:4 with it",
        ),
        (
            {"sizes": "2,9"},
            "--sizes '2,9': 9 is not within --nnodes 2:8; use sizes from 2 to 8, or another --nnodes",
        ),
        (
            {"sizes": "2,4", "nnodes": "4"},
            "--sizes '2,4': the job has 4 nodes and no other number; use --nnodes 2:4 with it",
        ),
        ({"sizes": "2,4,8", "start_size": "3"}, "--start-size '3': not an allowed size; use one of 2, 4, 8"),
        ({"start_size": "9"}, "--start-size '9': not within --nnodes 2:8; use a number from 2 to 8"),
        ({"cooldown": "-1"}, "--cooldown '-1': not a time; use seconds, such as 0.5"),
    ],
)
def test_sizes_that_are_refused(values: dict[str, str], said: str) -> None:
    assert refusal(**{"nnodes": "2:8", **values}) == said
