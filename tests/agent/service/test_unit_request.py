"""A node accepts of a submission what its configuration allows, and nothing else."""

from __future__ import annotations

import pytest

from bagua_agent.autotune import sampling
from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.config.job_config_file import encode
from bagua_agent.service.config import agent_config
from bagua_agent.service.units.unit_request import SUBMITTED, unit_request
from bagua_contract import cluster_pb2 as pb

CONFIG = agent_config.check(
    {
        "insecure": True,
        "etcd": {"endpoints": ["127.0.0.1:2379"]},
        "node": {"name": "n0", "slots": 4},
        "jobs": {"default_user": "train", "users": ["ann"], "environment": ["LR", "NCCL_*", "TZ"]},
    },
    "test",
    "n0",
)


# The C library of a root agent would open the file.
ODD_ZONES = ("/etc/shadow", ":/dev/zero", "../../etc/shadow", "UTC\n", "a/b/c/d", ":UTC", "~x")


def submission(
    environment: dict[str, str] | None = None,
    user: str = "",
    directory: str = "/data",
    arguments: tuple[str, ...] = (),
) -> pb.Submission:
    job = JobConfig(command=WorkerCommand(CommandKind.SCRIPT, "train.py", arguments), job_id="job")
    return pb.Submission(
        job_id="job",
        min_nodes=1,
        max_nodes=2,
        user=user,
        directory=directory,
        environment=environment or {},
        launch=encode(job, SUBMITTED),
    )


def test_a_job_that_is_tuned_needs_optuna_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    command = WorkerCommand(CommandKind.SCRIPT, "train.py", ())
    job = JobConfig(
        "job", command, autotune_level=2, autotune_algorithms=("bytegrad",), autotune_warmup_s=3.0
    )
    asked = pb.Submission(
        job_id="job", min_nodes=1, max_nodes=2, directory="/data", launch=encode(job, SUBMITTED)
    )
    monkeypatch.setattr(sampling.importlib.util, "find_spec", lambda name: object())
    made = unit_request(asked, (0,), CONFIG, have_gpus=False).config
    assert (made.autotune_level, made.autotune_algorithms, made.autotune_warmup_s) == (2, ("bytegrad",), 3.0)
    monkeypatch.setattr(sampling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"Optuna is not installed on this node; pip install 'bagua-elastic"):
        unit_request(asked, (0,), CONFIG, have_gpus=False)
    unit_request(submission(), (0,), CONFIG, have_gpus=False)


def test_variables_that_are_allowed_and_the_gpus_of_its_slots() -> None:
    asked = {"LR": "0.1", "NCCL_DEBUG": "INFO", "TZ": "America/Argentina/Buenos_Aires"}
    made = unit_request(submission(asked), (1, 3), CONFIG, have_gpus=True)
    assert made.environment.items() >= {**asked, "CUDA_VISIBLE_DEVICES": "1,3"}.items()
    assert (made.config.slots, made.config.run_as) == (2, "train")
    without = unit_request(submission(), (1, 3), CONFIG, have_gpus=False)
    assert set(without.environment) == {"PATH", "LANG"}, "nothing of the daemon's own"


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (submission({"LD_PRELOAD": "/tmp/x.so", "LR": "1"}), "n0 lets no job set LD_PRELOAD"),
        (submission({"PATH": "/tmp"}), "n0 lets no job set PATH"),
        *((submission({"TZ": zone}), "is no time zone; use a name") for zone in ODD_ZONES),
        (submission(user="root"), "jobs don't run as 'root' on n0; use train, ann"),
        (submission(directory="../data"), "directory '../data' is not absolute"),
        (submission(directory="/da\0ta"), "holds a zero byte"),
        (submission(arguments=("a", "x" * 1_000_000)), "n0 can't run it: argument 2 has 1000000 bytes"),
        (submission(arguments=("a\0",)), "command.args is .*, which holds a zero byte"),
        (submission(arguments=("\ud800",)), "command.args is .*, which holds half a character"),
        (submission({"NCCL_=X": "1"}), "n0 can't run it: variable 'NCCL_=X' has no name"),
        (submission({"LR": "\0"}), "n0 can't run it: variable 'LR' holds a zero byte"),
    ],
)
def test_what_is_not_allowed_is_refused(asked: pb.Submission, line: str) -> None:
    with pytest.raises(UserError, match=line):
        unit_request(asked, (0,), CONFIG, have_gpus=False)


def test_the_node_alone_says_where_metrics_go() -> None:
    made = unit_request(submission(), (0,), CONFIG, have_gpus=False).config
    assert (made.metrics_port, made.metrics_tls, made.otel) == (None, (), None)

    content = {
        "etcd": {"endpoints": ["127.0.0.1:2379"]},
        "jobs": {"metrics": True, "otel": "http://collector:4318"},
        "dashboard": {"listen": "7465"},
    }
    made = unit_request(submission(), (0,), agent_config.check(content, "t", "n0"), have_gpus=False).config
    assert (made.metrics_port, made.metrics_host, made.metrics_tls) == (0, "127.0.0.1", ())
    assert made.otel == "http://collector:4318"

    tls = {
        "ca_file": "/t/ca.pem",
        "cert_file": "/t/c.pem",
        "key_file": "/t/k.pem",
        "revoked_file": "/t/r.pem",
    }
    content |= {"tls": tls, "dashboard": {"listen": "[fd00::5]:7465"}}
    made = unit_request(submission(), (0,), agent_config.check(content, "t", "n0"), have_gpus=False).config
    assert (made.metrics_host, made.metrics_tls) == (
        "fd00::5",
        ("/t/ca.pem", "/t/c.pem", "/t/k.pem", "/t/r.pem"),
    )
