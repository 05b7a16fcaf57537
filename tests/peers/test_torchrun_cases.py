"""torch's own tests of torchrun (test/distributed/launcher/test_run.py of torch 2.13), applied to bagua-launch.

Each test names its case there. Two do not apply. `test_nproc_xpu_launch_configurations`: bagua-launch counts NVIDIA's
GPUs and nothing of it runs on an XPU, so `--nproc-per-node xpu` is refused. `test_virtual_local_rank` compares what is
compiled for two GPUs; what the option does to a worker is in tests/launch/test_virtual_local_rank.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from bagua_launch.errors import RequestError
from bagua_launch.job_request import parse_request
from bagua_launch.main import cli
from bagua_launch.written_values import WrittenValue
from tests.lab.free_port import free_port
from tests.lab.wait import HANG_S
from tests.peers.conftest import Launch, launch_environment

# A worker as that file's: it looks at its variables and touches a file that is named after its rank.
TOUCHES = """
import os, sys
from pathlib import Path
names = ["LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE"]
names += ["ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"]
names += ["TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TEST_SENTINEL_PARENT"]
missing = [name for name in names if name not in os.environ]
assert not missing, missing
assert os.environ["TEST_SENTINEL_PARENT"] == "FOOBAR"
Path("touched", os.environ["RANK"]).touch(exist_ok=False)
"""
SHELL = '#!/bin/sh\necho "creating $1/$RANK"\ntouch "$1/$RANK"\n'
LAUNCHED = "import torch.distributed as d\nprint(d.is_torchelastic_launched())\n"
MEETS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[1],
                        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size() == 2
dist.destroy_process_group()
"""
SENTINEL = {"TEST_SENTINEL_PARENT": "FOOBAR"}


@pytest.fixture
def touched(tmp_path: Path) -> Path:
    directory = tmp_path / "touched"
    directory.mkdir()
    shell = tmp_path / "touch.sh"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    return directory


def ranks(directory: Path) -> set[str]:
    return set(os.listdir(directory))


def succeeded(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stderr
    return done


def test_user_script(launch: Launch, touched: Path) -> None:
    """test_launch_user_script_python"""
    words = ("--nnodes=1", "--nproc-per-node=4", "--rdzv-id=17", "--monitor-interval=1")
    succeeded(launch(*words, script=TOUCHES, env=SENTINEL, start_method="spawn"))
    assert ranks(touched) == {"0", "1", "2", "3"}


def test_user_script_with_a_master(launch: Launch, touched: Path) -> None:
    """test_launch_user_script_python_caffe2_bc"""
    master = ("--master-addr=localhost", f"--master-port={free_port()}", "--node-rank=0")
    succeeded(launch("--nnodes=1", "--nproc-per-node=4", *master, script=TOUCHES, env=SENTINEL))
    assert ranks(touched) == {"0", "1", "2", "3"}


def test_any_port(launch: Launch, touched: Path) -> None:
    """The rendezvous that torchrun's --standalone stands for; torch has no case of it by its flags."""
    words = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node", "2")
    succeeded(launch(*words, script=TOUCHES, env=SENTINEL))
    assert ranks(touched) == {"0", "1"}


@pytest.mark.parametrize("workers", [(), ("--nproc-per-node=4",)])
def test_shell_script(launch: Launch, touched: Path, workers: tuple[str, ...]) -> None:
    """test_launch_user_script_bash, test_launch_user_script_default_nproc, test_nproc_launch_number_configurations"""
    words = ("--nnodes=1", *workers, "--rdzv-id=17", "--monitor-interval=1", "--no-python")
    refused = launch(*words, "--module", "./touch.sh", str(touched))
    assert refused.returncode == 2 and "--module with --no-python" in refused.stderr
    succeeded(launch(*words, "./touch.sh", str(touched)))
    assert ranks(touched) == ({"0", "1", "2", "3"} if workers else {"0"})


def test_variables_of_options(launch: Launch, touched: Path) -> None:
    """test_launch_with_env_vars"""
    variables = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4", "PET_RDZV_ID": "17"}
    variables |= {"PET_MONITOR_INTERVAL": "1", "PET_START_METHOD": "spawn", "PET_NO_PYTHON": "1"}
    program = ("./touch.sh", str(touched))
    refused = launch(*program, env={**variables, "PET_MODULE": "1"}, start_method=None)
    assert refused.returncode == 2 and "--module with --no-python" in refused.stderr
    succeeded(launch(*program, env={**variables, "PET_MODULE": "0"}, start_method=None))
    assert ranks(touched) == {"0", "1", "2", "3"}


class Node:
    def __init__(self, gpus: int, cpus: int) -> None:
        self._gpus, self._cpus = gpus, cpus

    def gpu_count(self) -> int:
        return self._gpus

    def cpu_count(self) -> int:
        return self._cpus

    def owns_address(self, host: str) -> bool:
        return host == "localhost"

    def ignores(self, signal_name: str) -> bool:
        return False


@pytest.mark.parametrize(
    ("text", "gpus", "slots"), [("auto", 0, 5), ("auto", 3, 3), ("gpu", 3, 3), ("cpu", 3, 5), ("4", 0, 4)]
)
def test_number_of_workers(text: str, gpus: int, slots: int) -> None:
    """test_nproc_launch_auto_configurations, test_nproc_gpu_launch_configurations"""
    values = {"nproc_per_node": WrittenValue(text, "--nproc-per-node")}
    assert parse_request(values, ("train.py",), Node(gpus, 5)).config.slots == slots


@pytest.mark.parametrize("text", ["unknown", "xpu"])
def test_unknown_number_of_workers(text: str) -> None:
    """test_nproc_launch_unknown_configurations"""
    with pytest.raises(RequestError, match="not a number of workers"):
        parse_request({"nproc_per_node": WrittenValue(text, "--nproc-per-node")}, ("train.py",), Node(0, 5))


def elastic(port: int) -> tuple[str, ...]:
    """As written there, with quotes that no shell has removed."""
    return (
        *("--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"),
        *("--rdzv-conf='join_timeout=5,last_call_timeout=1,timeout=5'", "--rdzv-id=17"),
        *("--monitor-interval=1", "--max-restarts=0"),
    )


def test_one_node_of_two(launch: Launch, touched: Path) -> None:
    """test_launch_elastic"""
    succeeded(launch(*elastic(free_port()), script=TOUCHES, env=SENTINEL))
    assert ranks(touched) == {"0", "1"}


def test_a_worker_that_fails(launch: Launch) -> None:
    """test_launch_elastic_worker_raise_exception"""
    done = launch(*elastic(free_port()), script="raise RuntimeError('raised by the test')\n")
    assert done.returncode == 1
    assert "1 script failure" in done.stderr and "RuntimeError: raised by the test" in done.stderr


def test_two_nodes(launch: Launch, touched: Path) -> None:
    """test_launch_elastic_multiple_agents, with a last call that both starts fit into. Ours is 0.3 s after the least
    number of nodes is there, torchrun's 30 s; a node that comes later joins by a restart of the workers."""
    words = (*elastic(free_port()), "--rdzv_conf=last_call_timeout=10,timeout=5")
    with ThreadPoolExecutor(2) as both:
        nodes = [both.submit(launch, *words, script=TOUCHES, env=SENTINEL) for _ in range(2)]
        for node in nodes:
            succeeded(node.result())
    assert ranks(touched) == {"0", "1", "2", "3"}


class Broken(Exception):
    pass


@pytest.fixture
def broken_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    def run_job(config: object) -> int:
        raise Broken("raised by the test")

    agent = ModuleType("bagua_agent.job.run")
    agent.__dict__["run_job"] = run_job
    monkeypatch.setitem(sys.modules, "bagua_agent.job.run", agent)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    yield


@pytest.mark.usefixtures("broken_agent")
def test_an_agent_that_fails() -> None:
    """test_launch_elastic_agent_raise_exception: the exception is not lost on its way out."""
    result = CliRunner().invoke(cli, ["--nnodes", "1", "script.py"], prog_name="bagua-launch")
    assert isinstance(result.exception, Broken)


def test_standalone_leaves_nothing_behind(launch: Launch, touched: Path, tmp_path: Path) -> None:
    """test_launch_standalone; test_launch_shutdown: the rendezvous is closed at the end"""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = ("--nnodes=1", "--nproc-per-node=4", "--standalone", "--monitor-interval=1")
    succeeded(launch(*words, script=TOUCHES, env={**SENTINEL, "TMPDIR": str(temporary)}))
    assert ranks(touched) == {"0", "1", "2", "3"}
    assert not list(temporary.iterdir())
    mine = f"TMPDIR={temporary}".encode()
    for process in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert mine not in process.read_bytes().split(b"\0"), f"{process} is left"
        except OSError:
            continue  # it has ended, or another account's


def test_run_path(launch: Launch, touched: Path) -> None:
    """test_launch_run_path"""
    succeeded(launch("--run-path", "--nnodes=1", "--nproc-per-node=4", script=TOUCHES, env=SENTINEL))
    assert ranks(touched) == {"0", "1", "2", "3"}


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 1)), ("2:20", (2, 20))])
def test_nodes(text: str, nodes: tuple[int, int]) -> None:
    """test_min_max_nodes_parse"""
    config = parse_request({"nnodes": WrittenValue(text, "--nnodes")}, ("train.py",), Node(0, 5)).config
    assert (config.min_nodes, config.max_nodes) == nodes


def test_three_numbers_of_nodes() -> None:
    """test_min_max_nodes_parse"""
    with pytest.raises(RequestError, match="2:20:30"):
        parse_request({"nnodes": WrittenValue("2:20:30", "--nnodes")}, ("train.py",), Node(0, 5))


@pytest.mark.parametrize("words", [(), ("--logs_specs=default",)])
def test_torch_sees_that_it_is_launched(launch: Launch, words: tuple[str, ...]) -> None:
    """test_is_torchelastic_launched, test_is_torchelastic_launched_with_logs_spec_defined"""
    done = launch("--run-path", "--nnodes=1", "--nproc-per-node=1", *words, script=LAUNCHED)
    assert succeeded(done).stdout == "True\n"


def test_unknown_logs_specs(launch: Launch) -> None:
    """test_logs_logs_spec_entrypoint_must_be_defined"""
    done = launch("--run-path", "--nnodes=1", "--logs_specs=DOESNOT_EXIST", script=LAUNCHED)
    assert done.returncode == 2 and "DOESNOT_EXIST" in done.stderr


def test_torch_sees_that_it_is_not_launched(tmp_path: Path) -> None:
    """test_is_not_torchelastic_launched"""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHED],
        env=launch_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("method", ["tcp", "env"])
def test_ways_to_init_the_group(launch: Launch, tmp_path: Path, method: str) -> None:
    """test_init_method_tcp_with_torchelastic, test_init_method_env_with_torchelastic"""
    port = free_port()
    (tmp_path / "meets.py").write_text(MEETS)
    words = ("--nnodes=1", "--nproc-per-node=2", "--master-addr=localhost", f"--master-port={port}")
    where = "env://" if method == "env" else f"tcp://localhost:{port}"
    succeeded(launch("--run-path", *words, "meets.py", where, start_method="warm"))


def test_teed_lines_with_a_template(launch: Launch, touched: Path) -> None:
    """test_capture_logs_using_default_logs_specs"""
    words = ("--nnodes=1", "--nproc-per-node=4", "--rdzv-id=17", "--redirect=3", "--tee=3", "--no-python")
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: "}
    done = succeeded(launch(*words, "./touch.sh", str(touched), env=template))
    for rank in range(4):
        assert re.search(rf"^\[rank{rank}\]: creating ", done.stdout, re.MULTILINE), done.stdout
