"""What a host of `--hosts` says and ends with, started as ssh starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_agent.base.sizes import ANY_SIZE
from bagua_launch.ssh_hosts import only_typed_on_hosts
from bagua_launch.ssh_run import exit_code
from tests.lab.launched import environment
from tests.launch.launcher import STAND_IN, Completed, Launcher, asked_of

LIMIT_S = 60.0


def run_node(
    directory: Path,
    *arguments: str,
    variables: dict[str, str],
    block_optimizer: str = "",
    is_earlier: bool = False,
) -> Completed:
    """stand_in: directory with the module that takes the agent's place; empty: none.
    is_earlier: the terminal has a version that did not send `only_typed`."""
    request: dict[str, object] = {
        "files": {},
        "arguments": arguments,
        "environment": variables,
        "directory": str(directory),
    }
    if not is_earlier:
        request["only_typed"] = sorted(only_typed_on_hosts({}))
    words = [sys.executable, "-m", "bagua_launch.remote_node"]
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (block_optimizer, env["PYTHONPATH"])))
    with subprocess.Popen(
        words,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as node:
        try:
            assert node.stdin is not None and node.stdout is not None and node.stderr is not None
            node.stdin.write(json.dumps(request) + "\n")
            node.stdin.flush()  # its end would end the node
            code = node.wait(LIMIT_S)
            return Completed(words, code, node.stdout.read(), node.stderr.read())
        finally:
            node.kill()


def ssh_stub(directory: Path) -> tuple[str, Path]:
    """A command in the place of ssh, and the file that exists once it was called."""
    called = directory / "ssh-was-called"
    stub = directory / "ssh-stub"
    stub.write_text(f'#!/bin/sh\necho "$@" >>{called}\nexit 3\n')
    stub.chmod(0o755)
    return str(stub), called


def test_a_mistake_on_one_host_is_one_line(tmp_path: Path) -> None:
    done = run_node(tmp_path, "missing.py", variables={})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("bagua-launch: ") and "missing.py" in line


@pytest.mark.parametrize(("code", "expected"), [(255, 254), (254, 254), (3, 3), (0, 0)])
def test_a_host_never_ends_with_the_code_of_a_failure_of_ssh(
    tmp_path: Path, code: int, expected: int
) -> None:
    """A script that ends by sys.exit(-1) fails its job with 255, and with another host's 0 that was a success."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(STAND_IN.replace("return 7", f"return {code}"))
    words = ("--rdzv-endpoint", "e1:1", "--rdzv-id", "demo", "train.py")
    done = run_node(tmp_path, *words, variables={}, block_optimizer=str(tmp_path))
    assert done.returncode == expected
    codes = [0, done.returncode]  # of another host, which left before the failure
    assert exit_code(codes) == expected


def test_hosts_that_ssh_lost_do_not_count() -> None:
    assert exit_code([0, 255]) == 0
    assert exit_code([255, 3]) == 3
    assert exit_code([255, 255]) == 255


def test_a_host_serves_a_terminal_of_an_earlier_version(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    words = ("--rdzv-endpoint", "e1:1", "--rdzv-id", "demo", "train.py")
    done = run_node(tmp_path, *words, variables={}, block_optimizer=str(tmp_path), is_earlier=True)
    assert asked_of(done)["id"] == "demo"


def test_a_host_takes_nothing_that_the_terminal_decides_from_its_own_file_and_variables(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    ssh, called = ssh_stub(tmp_path)
    path = tmp_path / "launch.toml"
    path.write_text(
        f'hosts = ["h1"]\nssh = "{ssh}"\nrdzv-endpoint = "elsewhere:1"\nstandalone = true\netcd-user = "u"\n'
        "nproc-per-node = 3\nmax-restarts = 2\n"
    )
    variables = {"BAGUA_CONFIG": str(path), "BAGUA_HOSTS": "h2", "PET_MASTER_ADDR": "h3"}
    done = run_node(
        tmp_path,
        *("--nnodes", "2", "--rdzv-endpoint", "e1:1", "--rdzv-id", "demo", "train.py"),
        variables=variables,
        block_optimizer=str(tmp_path),
    )
    assert not called.exists()
    asked = asked_of(done)
    assert (asked["id"], asked["nodes"], asked["endpoints"]) == ("demo", [2, 2], ["e1:1"])
    assert (asked["slots"], asked["restarts"]) == (3, 2)  # what describes the host, or any node, counts


def test_a_typed_standalone_leaves_out_hosts_that_were_not_typed(launch: Launcher) -> None:
    ssh, called = ssh_stub(launch.directory)
    path = launch.directory / "launch.toml"
    path.write_text(f'hosts = ["h1"]\nssh = "{ssh}"\n')
    for env in ({"BAGUA_CONFIG": str(path)}, {"BAGUA_HOSTS": "h1", "BAGUA_SSH": ssh}):
        assert launch.config("--standalone", env=env).endpoints is None
        assert not called.exists()
        assert launch("train.py", env=env).exit_code == 3
        assert called.exists()
        called.unlink()


@pytest.mark.parametrize(
    "credentials", ['etcd-ca = "nowhere"\n', 'etcd-user = "u"\netcd-password-file = "nowhere"\n']
)
def test_standalone_needs_no_credentials_of_the_cluster(launch: Launcher, credentials: str) -> None:
    path = launch.directory / "launch.toml"
    path.write_text(f'rdzv-endpoint = "etcd:2379"\n{credentials}')
    env = {"BAGUA_CONFIG": str(path)}
    assert launch.config("--standalone", env=env).endpoints is None
    refused = "'nowhere': No such file or directory; use a readable file"
    assert refused in launch("train.py", env=env).output
    assert refused in launch("--standalone", "--dashboard=8080", "train.py", env=env).output


@pytest.mark.parametrize("words", [("--standalone",), ("--standalone", "--nnodes", "1")])
def test_a_typed_standalone_leaves_out_what_describes_several_nodes(
    launch: Launcher, words: tuple[str, ...]
) -> None:
    path = launch.directory / "launch.toml"
    path.write_text('nnodes = "2:8"\nsizes = [2, 4, 8]\nstart-size = 4\nmax-restarts = 2\n')
    of_a_pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h3", "PET_MASTER_PORT": "33"}
    for env in ({"BAGUA_CONFIG": str(path)}, of_a_pod, {"BAGUA_CONFIG": str(path)} | of_a_pod):
        config = launch.config(*words, env=env)
        assert (config.min_nodes, config.max_nodes, config.size_policy) == (1, 1, ANY_SIZE)
        assert (config.master_addr, config.master_port, config.node_rank) == (None, None, None)
        assert config.max_restarts == (2 if "BAGUA_CONFIG" in env else 0)


def test_standalone_and_several_nodes_are_not_typed_together(launch: Launcher) -> None:
    path = launch.directory / "launch.toml"
    path.write_text("standalone = true\n")
    expected = "--nnodes '2': --standalone is for one node; use --nnodes 1, or no --standalone"
    assert launch.refusal("--nnodes", "2", "--standalone", "train.py") == expected
    assert launch.refusal("--nnodes", "2", "train.py", env={"BAGUA_CONFIG": str(path)}) == expected


def test_standalone_and_hosts_are_not_typed_together(launch: Launcher) -> None:
    assert launch.refusal("--hosts", "h1", "--standalone", "train.py") == (
        "--hosts 'h1': --standalone is for this node alone; use one of them"
    )
