"""The image is built by podman and its containers train: alone, as a pod of the Kubernetes job, and by compose.yaml.

One machine, no GPU. What replaces a registry that is not reached: image_sources.py.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import yaml

from tests.deploy.image_sources import etcd_image, pip_volumes, python_base, torch_argument
from tests.docs.printed import printed, printed_commands, printed_text
from tests.lab.containers import Containers, unavailable
from tests.lab.wait import eventually

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
DOCKERFILE = "deploy/docker/Dockerfile"
COMPOSE = "deploy/docker/compose.yaml"
EXAMPLE = "/opt/bagua/examples/char_lm.py"
BUILD_S, TRAIN_S = 1800.0, 300.0
STOPPED = 143
TRAINS = re.compile(r"in force from step 1: .*\n(?:.*\n)*.*loss ")


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Generator[Containers]:
    directory = tmp_path_factory.mktemp("containers")
    if reason := unavailable(directory):
        pytest.skip(reason)
    space = Containers(directory)
    yield space
    space.close()
    assert not directory.exists()


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same for all builds: a build that mounts others uses no layer of an earlier one."""
    return pip_volumes(tmp_path_factory.mktemp("pip"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what builds read: every build finds the same, so the later ones find all layers and need no network."""
    copy = tmp_path_factory.mktemp("sources")
    read = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for name in (*read, ".dockerignore", "deploy"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def image(
    containers: Containers, volumes: list[str], sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Built from this checkout."""
    (tag,) = re.findall(r"^ARG PYTHON=(\S+)$", (ROOT / DOCKERFILE).read_text(), re.MULTILINE)
    base = f"docker.io/library/python:{tag}"
    if reason := python_base(containers, base, tmp_path_factory.mktemp("base")):
        pytest.skip(reason)
    command, *words, place = printed(
        "docs/guide/kubernetes.md", "docker build", {DOCKERFILE: str(sources / DOCKERFILE)}
    )
    assert (command, place) == ("build", "."), "in a clone"
    here = f"--isolation chroot --network host --build-arg TORCH={torch_argument()}".split()
    containers.podman(command, *here, *volumes, *words, sources, limit_s=BUILD_S, outside=True)
    return words[words.index("-t") + 1]


def started(
    containers: Containers, name: str, image: str, *words: str, options: tuple[str, ...] = ()
) -> None:
    containers.podman("run", "--detach", "--network", "none", "--name", name, *options, image, *words)


def ended(containers: Containers, name: str) -> int:
    """The exit code of a container that ends by itself."""
    containers.podman("wait", name, limit_s=TRAIN_S)
    code = containers.exit_code(name)
    assert code is not None
    return code


def trains(containers: Containers, name: str) -> None:
    """Return when the container has made a step."""
    eventually(
        lambda: TRAINS.search(containers.logs(name)) or containers.exit_code(name) is not None,
        TRAIN_S,
        lambda: containers.logs(name),
        interval_s=0.5,
    )
    assert containers.exit_code(name) is None, containers.logs(name)


def test_the_image_runs_the_launcher_as_an_account_without_rights(containers: Containers, image: str) -> None:
    run = ("run", "--rm", "--network", "none")
    assert containers.podman(*run, image).startswith("Usage: bagua-launch ")
    assert containers.podman(*run, "--entrypoint", "id", image, "-u").strip() == "10001"
    kernels = "from bagua_core.kernels.cpu_library import find; print(find().where)"
    found = containers.podman(*run, "--entrypoint", "python", image, "-c", kernels)
    assert found.strip().endswith("built at installation")
    assert containers.run(["podman", *run, "--entrypoint", "cc", image]).returncode != 0  # no compiler


def test_two_workers_of_a_container_train_to_the_end(containers: Containers, image: str) -> None:
    short = ("--epochs", "1", "--characters", "20000")
    started(containers, "short", image, "--nproc-per-node", "2", EXAMPLE, *short)
    assert ended(containers, "short") == 0, containers.logs("short")
    assert "epoch 0: evaluation loss" in containers.logs("short")


def test_a_container_that_is_stopped_leaves_at_a_step_boundary(containers: Containers, image: str) -> None:
    started(containers, "stopped", image, EXAMPLE, "--epochs", "1000")
    trains(containers, "stopped")
    orphan = containers.podman("exec", "stopped", "sh", "-c", "sh -c 'sleep 0.2 & echo $!'").strip()
    assert containers.podman("exec", "stopped", "cat", "/proc/1/comm").strip() == "tini"
    eventually(
        lambda: containers.run(["podman", "exec", "stopped", "test", "-e", f"/proc/{orphan}"]).returncode,
        TRAIN_S,
        f"process {orphan} of the container is not reaped",
    )
    containers.podman("stop", "--time", "45", "stopped")
    assert containers.exit_code("stopped") == STOPPED, containers.logs("stopped")
    assert "leaving at the next step boundary" in containers.logs("stopped")
    assert "stopped: every worker left" in containers.logs("stopped")


def with_checkpoints() -> str:
    """The option that the overlay of the page on Kubernetes adds."""
    overlay = yaml.safe_load(printed_text("docs/guide/kubernetes.md", "images:"))
    (patch,) = overlay["patches"]
    (option,) = [o["value"] for o in yaml.safe_load(patch["patch"]) if "/args/" in o["path"]]
    return str(option)


def test_a_pod_of_the_kubernetes_job_leaves_with_its_checkpoint(containers: Containers, image: str) -> None:
    (job,) = yaml.safe_load_all((ROOT / "deploy/kubernetes/base/job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    program, *command = trainer["command"]
    assert trainer["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert not trainer["securityContext"]["allowPrivilegeEscalation"]
    account = str(pod["securityContext"]["runAsUser"])
    options = ("--cap-drop", "all", "--security-opt", "no-new-privileges", "--user", account)
    options += ("--env", "JOB=trainer", "--env", "JOB_UID=0f9d3a1c-1", "--env", "BAGUA_ONCE=1")
    options += ("--tmpfs", "/checkpoints:mode=1777", "--entrypoint", program)
    words = [word for word in trainer["args"] if not word.startswith("--nnodes")]
    started(
        containers, "pod", image, *command, with_checkpoints(), *words, "--epochs", "1000", options=options
    )
    trains(containers, "pod")
    containers.podman("stop", "--time", str(pod["terminationGracePeriodSeconds"]), "pod")
    assert containers.exit_code("pod") == STOPPED, containers.logs("pod")
    assert re.search(r"the checkpoint of step \d+ is written", containers.logs("pod"))


def test_containers_of_compose_join_are_lost_and_leave(
    containers: Containers, image: str, volumes: list[str], sources: Path, tmp_path: Path
) -> None:
    """The page's commands, by podman-compose. Its containers have other names: bagua_trainer_2 for bagua-trainer-2."""
    if importlib.util.find_spec("podman_compose") is None:
        pytest.skip("no podman-compose; install the extra `containers`")
    services = yaml.safe_load((ROOT / COMPOSE).read_text())["services"]
    etcd_image(containers, services["etcd"]["image"], tmp_path)
    endless = tmp_path / "endless.yaml"
    command = [*services["trainer"]["command"], "--epochs", "1000"]
    endless.write_text(yaml.safe_dump({"services": {"trainer": {"command": command}}}))
    first, grown, lost = printed_commands("deploy/README.md", "docker compose")
    assert first[:4] == grown[:4] == ["docker", "compose", "-f", COMPOSE]
    # The build mounts and asks for what the one of the fixture did, so it takes that one's layers.
    build = " ".join(["--isolation", "chroot", *volumes])
    compose = [
        sys.executable,
        "-m",
        "podman_compose",
        f"--podman-build-args={build}",
        "-f",
        sources / COMPOSE,
    ]
    compose += ["-f", endless]
    env = {"TORCH": torch_argument()}
    containers.start([*compose, *first[4:]], tmp_path / "up.log", env)
    names = [f"bagua_trainer_{number}" for number in (1, 2, 3, 4)]

    def reaches(name: str, text: str) -> None:
        eventually(
            lambda: text in containers.logs(name),
            TRAIN_S,
            lambda: f"{name}: no {text!r}\n{(tmp_path / 'up.log').read_text()[-6000:]}",
            interval_s=0.5,
        )

    for name in names[:3]:
        reaches(name, ": 3 workers on 3 nodes")
    trained = containers.run([*compose, *grown[4:]], env=env)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    for name in names:
        reaches(name, ": 4 workers on 4 nodes")

    program, *words, victim = lost
    assert program == "docker" and victim == "bagua-trainer-2"
    containers.podman(*words, names[1])
    for name in (names[0], names[2], names[3]):
        reaches(name, ": 3 workers on 3 nodes (-")
    assert containers.exit_code(names[1]) == 137

    containers.podman("stop", "--time", "45", names[0])
    assert containers.exit_code(names[0]) == 0, containers.logs(names[0])
    assert "left; the job goes on without this node" in containers.logs(names[0])
    for name in names[2:]:
        reaches(name, ": 2 workers on 2 nodes (-")
        assert containers.exit_code(name) is None
    assert containers.run(["podman", "healthcheck", "run", "bagua_etcd_1"]).returncode == 0
