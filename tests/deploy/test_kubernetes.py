"""The manifests of deploy/kubernetes are consistent, and their commands are valid. Schemas: scripts/check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.parsed import parsed
from tests.lab.wait import eventually

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy/kubernetes/base"


def objects() -> list[dict[str, Any]]:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert {p.name for p in BASE.iterdir()} == {*listed, "kustomization.yaml"}
    return [each for name in listed for each in yaml.safe_load_all((BASE / name).read_text())]


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = [o for o in objects() if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def pod_templates() -> list[dict[str, Any]]:
    return [o["spec"]["template"] for o in objects() if "template" in o.get("spec", {})]


def test_selectors_find_pods_and_accounts_exist() -> None:
    labels = [t["metadata"]["labels"] for t in pod_templates()]
    assert len(labels) == 2
    for each in objects():
        spec = each.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector:
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= have.items() for have in labels), (each["kind"], wanted)
    accounts = {o["metadata"]["name"] for o in objects() if o["kind"] == "ServiceAccount"}
    assert {t["spec"]["serviceAccountName"] for t in pod_templates()} == accounts


def test_members_of_etcd_are_named_alike_everywhere() -> None:
    etcd = one("StatefulSet", "etcd")["spec"]
    assert one("Service", etcd["serviceName"])["spec"]["clusterIP"] == "None"
    names = [f"etcd-{i}.{etcd['serviceName']}" for i in range(etcd["replicas"])]
    (container,) = etcd["template"]["spec"]["containers"]
    (members,) = [c for c in container["command"] if c.startswith("--initial-cluster=")]
    assert members.removeprefix("--initial-cluster=") == ",".join(
        f"{name.partition('.')[0]}=http://{name}:2380" for name in names
    )
    (trainer,) = one("Job", "trainer")["spec"]["template"]["spec"]["containers"]
    assert {e["name"]: e["value"] for e in trainer["env"]} == {
        "BAGUA_ETCD": ",".join(f"{name}:2379" for name in names)
    }


def test_ports_that_policies_open_are_those_that_are_listened_on() -> None:
    (container,) = one("StatefulSet", "etcd")["spec"]["template"]["spec"]["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    opened = {p["port"] for rule in one("NetworkPolicy", "etcd")["spec"]["ingress"] for p in rule["ports"]}
    assert opened == {ports["client"], ports["peer"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ports


def test_the_patch_for_gpus_fits_the_job() -> None:
    """Applied as JSON patch (RFC 6902) says: to a path whose parent is there."""
    gpu = yaml.safe_load((BASE.parent / "gpu/kustomization.yaml").read_text())
    assert [(BASE.parent / "gpu" / name).resolve() for name in gpu["resources"]] == [BASE]
    (patch,) = gpu["patches"]
    trainer = one(patch["target"]["kind"], patch["target"]["name"])
    for change in yaml.safe_load(patch["patch"]):
        *way, last = (w.replace("~1", "/").replace("~0", "~") for w in change["path"].split("/")[1:])
        parent: Any = trainer
        for step in way:
            parent = parent[int(step) if isinstance(parent, list) else step]
        assert change["op"] == "add"
        if isinstance(parent, list):
            parent.insert(int(last), change["value"])
        else:
            parent[last] = change["value"]
    (container,) = trainer["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    environment = {e["name"]: e["value"] for e in container["env"]}
    flag, _, value = container["args"][0].partition("=")
    assert value == "gpu"  # what a node has; this machine may have none
    assert parsed([f"{flag}=3", *container["args"][1:]], environment).slots == 3


def test_volumes_are_there() -> None:
    for kind, name in (("Job", "trainer"), ("StatefulSet", "etcd")):
        spec = one(kind, name)["spec"]
        volumes = {v["name"] for v in spec["template"]["spec"].get("volumes", [])}
        volumes |= {v["metadata"]["name"] for v in spec.get("volumeClaimTemplates", [])}
        (container,) = spec["template"]["spec"]["containers"]
        assert {m["name"] for m in container["volumeMounts"]} == volumes


def test_the_agent_accepts_its_arguments_and_has_time_to_leave() -> None:
    job = one("Job", "trainer")["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environment = {e["name"]: e["value"] for e in container["env"]}
    config = parsed(container["args"], environment)
    assert config.max_nodes == job["parallelism"] == job["completions"]
    assert job["maxFailedIndexes"] == config.max_nodes - config.min_nodes
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] > config.shutdown_timeout_s


class Pod:
    """The container's command, without its tini; its arguments are the test's."""

    def __init__(self, script: Path) -> None:
        (container,) = one("Job", "trainer")["spec"]["template"]["spec"]["containers"]
        tini, dashes, *command = container["command"]
        assert (tini, dashes) == ("tini", "--")
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.process = subprocess.Popen(
            [*command, "--standalone", str(script)], env=environment, cwd=script.parent
        )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path('began').touch()\n"
        "while not pathlib.Path('end').exists(): time.sleep(0.01)\n"
        "sys.exit(int(pathlib.Path('end').read_text()))\n"
    )
    return path


@pytest.mark.parametrize("code", [0, 3])
def test_a_pod_ends_as_its_agent_does(script: Path, code: int) -> None:
    script.with_name("end").write_text(str(code))
    assert Pod(script).process.wait(60) == code


def test_a_pod_that_was_told_to_leave_is_not_taken_for_a_finished_one(script: Path) -> None:
    pod = Pod(script)
    eventually(script.with_name("began").exists, 30, lambda: "the script to begin")
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(45) == 128 + signal.SIGTERM
