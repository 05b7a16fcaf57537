"""The manifests of deploy/kubernetes are consistent, and their commands are valid; kubectl builds and patches them.

Schemas of the files themselves: scripts/check. Without kubectl the base is read from its files, and the overlay is not
checked.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.launched import launched
from tests.docs.printed import printed, printed_text
from tests.lab.wait import HANG_S, eventually

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy/kubernetes/base"
GPU = BASE.parent / "gpu"
# from the labels of a pod
OF_POD = {"JOB": "trainer", "JOB_UID": "0f9d3a1c-1111-2222-3333-444444444444"}


def kubectl(*words: str | Path) -> list[dict[str, Any]]:
    """The objects that it prints."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    environment = {**os.environ, "KUBECONFIG": os.devnull}  # it knows no cluster
    done = subprocess.run(
        ["kubectl", *words], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@cache
def files() -> list[dict[str, Any]]:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert {p.name for p in BASE.iterdir()} == {*listed, "kustomization.yaml"}
    return [each for name in listed for each in yaml.safe_load_all((BASE / name).read_text())]


@cache
def objects() -> list[dict[str, Any]]:
    return kubectl("kustomize", BASE) if shutil.which("kubectl") else files()


def one(kind: str, name: str, among: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    (found,) = [o for o in among or objects() if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def pod_templates() -> list[dict[str, Any]]:
    return [o["spec"]["template"] for o in objects() if "template" in o.get("spec", {})]


def given(container: dict[str, Any]) -> dict[str, str]:
    """The variables whose values the manifest has; other ones come from the pod's labels."""
    return {e["name"]: e["value"] for e in container["env"] if "value" in e}


def names(of: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((o["kind"], o["metadata"]["name"]) for o in of)


@pytest.mark.parametrize("overlay", [BASE, GPU], ids=lambda path: path.name)
def test_kustomize_builds_all_objects_in_the_namespace(overlay: Path) -> None:
    built = kubectl("kustomize", overlay)
    assert names(built) == names(files())
    for each in built:
        assert kubernetes_validate.validate(each, "1.31", strict=True) == "1.31"
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "bagua"
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "bagua"


def test_the_first_command_of_the_page_prints_the_objects_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    built = kubectl(*printed("docs/guide/kubernetes.md", "kubectl kustomize"))
    job, etcd = one("Job", "trainer", built)["spec"], one("StatefulSet", "etcd", built)["spec"]
    assert (job["completionMode"], job["parallelism"], etcd["replicas"]) == ("Indexed", 4, 3)
    assert "NetworkPolicy" in {each["kind"] for each in built}


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
    assert given(trainer)["BAGUA_ETCD"] == ",".join(f"{name}:2379" for name in names)


def test_ports_that_policies_open_are_those_that_are_listened_on() -> None:
    (container,) = one("StatefulSet", "etcd")["spec"]["template"]["spec"]["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    opened = {p["port"] for rule in one("NetworkPolicy", "etcd")["spec"]["ingress"] for p in rule["ports"]}
    assert opened == {ports["client"], ports["peer"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ports


def test_the_overlay_gives_each_pod_a_gpu(tmp_path: Path) -> None:
    (container,) = one("Job", "trainer", kubectl("kustomize", GPU))["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    flag, _, value = container["args"][0].partition("=")
    assert value == "gpu"  # what a node has; this machine may have none
    container["args"][0] = f"{flag}=3"
    assert launched(container, OF_POD, tmp_path).slots == 3


def test_the_printed_overlay_names_an_image_and_a_claim(tmp_path: Path) -> None:
    shutil.copytree(BASE, tmp_path / "deploy/kubernetes/base")
    overlay = tmp_path / printed("docs/guide/kubernetes.md", "kubectl apply -k")[-1]
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(printed_text("docs/guide/kubernetes.md", "images:"))
    built = kubectl("kustomize", overlay)
    assert names(built) == names(files())
    job = one("Job", "trainer", built)
    assert kubernetes_validate.validate(job, "1.31", strict=True) == "1.31"
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == printed("docs/guide/kubernetes.md", "docker push")[-1]
    assert container["image"] == printed("docs/guide/kubernetes.md", "docker build")[-2]
    claims = {v["name"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
    (flag,) = [arg for arg in container["args"] if arg.startswith("--checkpoint-dir=")]
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == flag.partition("=")[2]]
    assert {mount["name"]} == claims, "checkpoints are on the claim"


def test_the_printed_patch_resizes_the_job() -> None:
    """`kubectl patch` works on the file, as it would on the cluster's object."""
    words = printed("docs/guide/kubernetes.md", "patch job trainer")
    assert words == printed("deploy/README.md", "patch job trainer")
    assert words[:5] == ["-n", "bagua", "patch", "job", "trainer"]
    (job,) = kubectl("patch", "--local", "-f", BASE / "job.yaml", *words[5:], "-o", "yaml")
    before, after = one("Job", "trainer", files())["spec"], job["spec"]
    assert after == before | {"parallelism": 3, "completions": 3} != before


def test_the_printed_arguments_are_the_jobs() -> None:
    (container,) = one("Job", "trainer")["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1].endswith("/char_lm.py")
    assert yaml.safe_load(printed_text("docs/guide/kubernetes.md", "args:")) == {"args": container["args"]}


def test_volumes_are_there() -> None:
    for kind, name in (("Job", "trainer"), ("StatefulSet", "etcd")):
        spec = one(kind, name)["spec"]
        volumes = {v["name"] for v in spec["template"]["spec"].get("volumes", [])}
        volumes |= {v["metadata"]["name"] for v in spec.get("volumeClaimTemplates", [])}
        (container,) = spec["template"]["spec"]["containers"]
        assert {m["name"] for m in container["volumeMounts"]} == volumes


def test_the_agent_accepts_its_arguments_and_has_time_to_leave(tmp_path: Path) -> None:
    job = one("Job", "trainer")["spec"]
    (container,) = job["template"]["spec"]["containers"]
    config = launched(container, OF_POD, tmp_path)
    assert config.max_nodes == job["parallelism"] == job["completions"]
    assert job["maxFailedIndexes"] == config.max_nodes - config.min_nodes
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] > config.shutdown_timeout_s


def test_pages_say_what_keeps_a_pod_of_a_lost_machine_from_being_replaced() -> None:
    """By this policy it has to fail first, which a machine that is away does not report."""
    waiting = [p for p in BASE.parent.rglob("*.yaml") if "podReplacementPolicy: Failed" in p.read_text()]
    assert len(waiting) == 3
    for page in ("docs/guide/kubernetes.md", "deploy/README.md"):
        text = (ROOT / page).read_text()
        assert "`podReplacementPolicy" in text and "kubectl delete node NAME" in text
        assert "node.kubernetes.io/out-of-service" in text


def test_a_job_runs_once_and_one_that_is_made_anew_runs_again(tmp_path: Path) -> None:
    """The etcd of the namespace outlives the Job, and with it the result."""
    (container,) = one("Job", "trainer")["spec"]["template"]["spec"]["containers"]
    labels = {
        e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"] if "valueFrom" in e
    }
    assert labels == {
        "JOB": "metadata.labels['batch.kubernetes.io/job-name']",
        "JOB_UID": "metadata.labels['batch.kubernetes.io/controller-uid']",
    }
    config = launched(container, OF_POD, tmp_path)
    assert (config.job_id, config.once) == ("trainer-0f9d3a1c", True)
    assert launched(container, {**OF_POD, "JOB_UID": "1b-2"}, tmp_path).job_id == "trainer-1b"


class Pod:
    """The container's command, without its tini; its arguments are the test's."""

    def __init__(self, script: Path) -> None:
        (container,) = one("Job", "trainer")["spec"]["template"]["spec"]["containers"]
        tini, dashes, *command = container["command"]
        assert (tini, dashes) == ("tini", "--")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, **OF_POD}
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
