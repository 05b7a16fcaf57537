"""A configuration file is read back as written; wrong values, and values that its writer may not set, are refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import CommandKind, JobConfig, StoreCredentials, WorkerCommand
from bagua_agent.config.job_config_file import SUBMITTED, decode, encode

PLAIN = JobConfig("demo", WorkerCommand(CommandKind.SCRIPT, "train.py", ("--lr", "0.1")))
FULL = replace(
    PLAIN,
    min_nodes=2, max_nodes=8, slots=4, endpoints=("https://e1:2379", "e2:2379"),
    store_credentials=StoreCredentials(ca_file="/ca", cert_file="/c", key_file="/k"),
    signals_to_handle=("SIGTERM",), hang_timeout_s=None, join_timeout_s=5.0, run_as="trainer", failpoints="heal=exit",
)  # fmt: skip


@pytest.mark.parametrize("config", [PLAIN, FULL])
def test_what_is_written_is_read_back(config: JobConfig) -> None:
    assert decode(encode(config)) == config
    assert set(json.loads(encode(PLAIN))) == {"job_id", "command"}, "defaults are not written"


def test_every_field_survives_a_change() -> None:
    for field in fields(JobConfig):
        value = getattr(PLAIN, field.name)
        other = {bool: True, int: 7, float: 7.5, str: "warm2", type(None): None, tuple: ("SIGINT",)}.get(
            type(value)
        )
        if other is None or field.name in ("min_nodes", "endpoints", "hosts_store"):
            continue
        changed = replace(PLAIN, **{field.name: other})
        assert decode(encode(changed)) == changed, field.name


def test_a_submission_says_only_what_is_the_submitters_to_say() -> None:
    read = decode(encode(FULL, SUBMITTED), SUBMITTED, slots=2, endpoints=("e:1",))
    assert (read.min_nodes, read.max_nodes, read.hang_timeout_s, read.join_timeout_s) == (2, 8, None, 5.0)
    assert (read.slots, read.endpoints, read.run_as, read.failpoints) == (2, ("e:1",), None, "")
    assert read.store_credentials == StoreCredentials() and read.signals_to_handle == PLAIN.signals_to_handle
    assert {f.name for f in fields(JobConfig)} >= SUBMITTED
    for name, value in [
        ("run_as", "root"),
        ("log_dir", "/etc"),
        ("endpoints", ["e:1"]),
        ("failpoints", "heal=exit"),
        ("metrics_host", "0.0.0.0"),
        ("otel", "http://c"),
    ]:
        with pytest.raises(UserError, match=repr(name)):
            decode(json.dumps({**json.loads(encode(PLAIN)), name: value}), SUBMITTED)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "can't be read"),
        ("[]", "is list"),
        ('{"nodes": 1}', "'nodes'"),
        ('{"job_id": 5}', "job_id is 5, which is no str"),
        ('{"job_id": "j"}', "makes no job"),
        ('{"job_id": "j", "command": {"kind": "script"}}', "command is incomplete"),
        ('{"job_id": "j", "command": {"kind": "other", "target": "t"}}', "command.kind is 'other'"),
        ('{"job_id": "j", "command": {"kind": "script", "target": "t", "x": 1}}', "command is"),
        ('{"min_nodes": true}', "min_nodes is True, which is no int"),
        ('{"min_nodes": 1.5}', "min_nodes is 1.5, which is no int"),
        ('{"signals_to_handle": [1]}', "signals_to_handle is 1"),
        ('{"job_id": "j", "command": {"kind": "script", "target": "t"}, "slots": 0}', "makes no job: slots"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        decode(text)
    assert said in str(refused.value) and "\n" not in str(refused.value)
