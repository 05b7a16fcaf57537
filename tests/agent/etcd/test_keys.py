from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.keys import JobKeys


def test_layout() -> None:
    keys = JobKeys("demo")
    prefix = "/bagua/v1/jobs/demo/"
    assert keys.prefix == prefix
    assert [keys.spec, keys.desired, keys.leader, keys.generation, keys.closing, keys.result] == [
        prefix + k
        for k in (
            "control/spec",
            "control/desired",
            "control/leader",
            "control/generation",
            "control/closing",
            "control/result",
        )
    ]
    assert keys.agent("a") == prefix + "agents/a"
    assert keys.member("w") == prefix + "members/w"
    assert keys.suspicion("w") == prefix + "suspicions/w"
    assert keys.failure("w") == prefix + "failures/w"
    assert keys.refused("w") == prefix + "refused/w"


@pytest.mark.parametrize("job_id", ["", ".", "..", "a/b", "a b", "a\n", "\x00", "ü", "x" * 101, "../other"])
def test_refuses_ids_that_are_no_part_of_a_key(job_id: str) -> None:
    with pytest.raises(UserError) as caught:
        JobKeys(job_id)
    assert repr(job_id) in str(caught.value)
    with pytest.raises(UserError):
        JobKeys("demo").member(job_id)


@given(st.from_regex(r"[A-Za-z0-9._-]{1,100}", fullmatch=True).filter(lambda i: i not in (".", "..")))
def test_an_id_comes_back_from_its_key(worker_id: str) -> None:
    keys = JobKeys("demo")
    assert keys.id_in(keys.members, keys.member(worker_id)) == worker_id
    assert keys.id_in(keys.agents, keys.member(worker_id)) is None


def test_a_deeper_key_holds_no_id() -> None:
    keys = JobKeys("demo")
    assert keys.id_in(keys.members, keys.members + "a/b") is None
    assert keys.id_in(keys.members, keys.members) is None
