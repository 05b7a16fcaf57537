"""The JobSet and the runtime of Kubeflow Trainer: their published models accept every field, and their shell works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.launched import launched
from tests.docs.printed import printed
from tests.lab.wait import HANG_S

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
RUNTIME = KUBERNETES / "kubeflow/cluster-training-runtime.yaml"
TRAIN_JOB = KUBERNETES / "kubeflow/train-job.yaml"
JOB_SET = KUBERNETES / "jobset/jobset.yaml"
MODELS = {
    RUNTIME: "TrainerV1alpha1ClusterTrainingRuntime",
    TRAIN_JOB: "TrainerV1alpha1TrainJob",
    JOB_SET: "JobsetV1alpha2JobSet",
}


def kubectl(*words: str | Path) -> dict[str, Any]:
    """The one object that it prints."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    environment = {**os.environ, "KUBECONFIG": os.devnull}  # it knows no cluster
    done = subprocess.run(
        ["kubectl", *words], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    printed_object: dict[str, Any] = yaml.safe_load(done.stdout)
    return printed_object


def model_of(path: Path) -> Any:
    from kubeflow_trainer_api import models  # takes 1.4 s, in each lane that collects the tests

    return getattr(models, MODELS[path])


def loaded(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(path.read_text())
    return read


def job_set_spec(path: Path) -> dict[str, Any]:
    spec: dict[str, Any] = loaded(path)["spec"]
    return spec["template"]["spec"] if path == RUNTIME else spec


def replicated(path: Path, name: str) -> dict[str, Any]:
    (found,) = [each for each in job_set_spec(path)["replicatedJobs"] if each["name"] == name]
    template: dict[str, Any] = found["template"]
    return template


def container(path: Path, name: str) -> dict[str, Any]:
    (found,) = replicated(path, name)["spec"]["template"]["spec"]["containers"]
    assert found["name"] == name
    return dict(found)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_the_published_model_knows_every_field(path: Path) -> None:
    written = loaded(path)
    model = model_of(path).from_dict(written)
    assert model is not None
    assert json.loads(json.dumps(model.to_dict(), default=str)) == written  # what it does not know, it drops


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_kubectl_reads_the_file_without_a_change(path: Path) -> None:
    """As far as it goes without a cluster: to one labelled object."""
    read = kubectl("label", "--local", "-f", path, "read=yes", "-o", "yaml")
    assert read["metadata"]["labels"].pop("read") == "yes"
    if not read["metadata"]["labels"]:
        del read["metadata"]["labels"]
    assert read == loaded(path)


def test_an_unknown_field_is_found() -> None:
    written = loaded(JOB_SET)
    written["spec"]["replicatedJobs"][0]["template"]["spec"]["elastic"] = True
    model = model_of(JOB_SET).from_dict(written)
    assert model is not None and model.to_dict() != written


@pytest.mark.parametrize("path", [RUNTIME, JOB_SET], ids=lambda path: path.name)
def test_etcd_is_where_the_agents_look_for_it(path: Path) -> None:
    spec = job_set_spec(path)
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["node"]
    assert spec["network"]["enableDNSHostnames"]
    (listen,) = [w for w in container(path, "etcd")["command"] if w.startswith("--listen-client-urls=")]
    environment = {e["name"]: e.get("value") for e in container(path, "node")["env"]}
    host, _, port = environment["BAGUA_ETCD"].partition(":")
    assert host == "$(JOBSET)-etcd-0-0.$(JOBSET)" and listen.endswith(f":{port}")
    names = [e["name"] for e in container(path, "node")["env"]]
    assert names.index("JOBSET") < names.index("BAGUA_ETCD")  # Kubernetes expands what is above


def test_the_train_job_uses_the_runtime_and_leaves_its_command() -> None:
    runtime, job = loaded(RUNTIME), loaded(TRAIN_JOB)["spec"]
    reference = job["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    assert runtime["apiVersion"].startswith(reference["apiGroup"])
    assert (
        "command" not in job["trainer"]
        and int(job["trainer"]["env"][0]["value"]) < job["trainer"]["numNodes"]
    )
    labels = replicated(RUNTIME, "node")["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


@pytest.mark.parametrize("path", [RUNTIME, JOB_SET], ids=lambda path: path.name)
@pytest.mark.parametrize(("nodes", "least", "most"), [("4", 2, 4), ("3:4", 3, 4), ("2:8", 2, 8)])
def test_the_count_of_pods_becomes_the_most_nodes(
    path: Path, nodes: str, least: int, most: int, tmp_path: Path
) -> None:
    """The container's own shell code runs a substitute for bagua-launch, whose words the parser then reads. A range
    holds as it is."""
    of_trainer = {
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "demo-node-0-0.demo",
        "PET_MASTER_PORT": "29400",
        "MIN_NODES": "2",
        "JOBSET": "demo",
        "JOBSET_UID": "0f9d3a1c-1111-2222-3333-444444444444",
        "BAGUA_ETCD": "demo-etcd-0-0.demo:2379",
    }
    node = container(path, "node")
    config = launched(node, of_trainer, tmp_path)
    assert (config.min_nodes, config.max_nodes, config.slots) == (least, most, 2)
    assert (config.job_id, config.node_rank, config.master_addr) == ("demo-0f9d3a1c", 1, None)
    assert config.once, "a pod that starts when the others have finished does not train again"
    assert config.command.target == node["args"][0]
    grace_s = replicated(path, "node")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > config.shutdown_timeout_s


def test_the_printed_patch_of_its_job_resizes_a_job_set(tmp_path: Path) -> None:
    """The Job is what JobSet's controller makes of the template: <JobSet>-<replicated job>-<index>."""
    name = loaded(JOB_SET)["metadata"]["name"]
    template = replicated(JOB_SET, "node")
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{name}-node-0"},
        "spec": template["spec"],
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    words = printed("deploy/README.md", "kubectl patch job bagua-node-0")
    assert words[:3] == ["patch", "job", job["metadata"]["name"]]
    patched = kubectl("patch", "--local", "-f", tmp_path / "job.yaml", *words[3:], "-o", "yaml")
    assert kubernetes_validate.validate(patched, "1.31", strict=True) == "1.31"
    assert patched["spec"] == template["spec"] | {"parallelism": 3, "completions": 3} != template["spec"]


def test_the_printed_patch_of_the_job_set_changes_its_nodes_alone() -> None:
    words = printed("deploy/README.md", "kubectl patch jobset")
    assert words[:3] == ["patch", "jobset", loaded(JOB_SET)["metadata"]["name"]]
    patched = kubectl("patch", "--local", "-f", JOB_SET, *words[3:], "-o", "yaml")
    model = model_of(JOB_SET).from_dict(patched)
    assert json.loads(json.dumps(model.to_dict(), default=str)) == patched
    wanted = loaded(JOB_SET)
    (node,) = [each for each in wanted["spec"]["replicatedJobs"] if each["name"] == "node"]
    node["template"]["spec"] |= {"parallelism": 3, "completions": 3}
    assert patched == wanted != loaded(JOB_SET)
