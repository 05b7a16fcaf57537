"""The transport for tensors of a GPU follows from the statements of all members, with a reason."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_core.communication.transport_choice import Choice, Setting, Statement, choose

AUTO, GLOO, NCCL = Setting.AUTO, Setting.GLOO, Setting.NCCL


def able(gpu: str, setting: Setting = AUTO, version: int = 22707, may_share: bool = False) -> Statement:
    return Statement(setting, True, "", version, gpu, may_share)


NO_GPU = Statement(AUTO)
NO_CUPY = Statement(
    AUTO, True, "NCCL is used through CuPy; install bagua-elastic[cuda12] or bagua-elastic[cuda13]"
)

STATEMENTS = st.builds(
    Statement,
    st.sampled_from(Setting),
    st.booleans(),
    st.sampled_from(["", "no CuPy"]),
    st.sampled_from([22707, 23004]),
    st.sampled_from(["a", "b"]),
    st.booleans(),
)


def test_all_members_that_can_use_nccl() -> None:
    choice = choose([able("h 0"), able("h 1"), able("i 0")])
    assert choice == Choice(True, "tensors of GPUs travel by NCCL 2.27.7")


def test_a_job_on_the_cpu_hears_nothing_of_it() -> None:
    choice = choose([NO_GPU, NO_GPU])
    assert not choice.is_nccl and not choice.is_notable and not choice.is_refused
    assert "no member's script uses one" in choice.reason


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (NO_GPU, r"global ranks \[1\] had nothing on a GPU when they joined\. Move the model there"),
        (NO_CUPY, r"on global ranks \[1\]: NCCL is used through CuPy; install bagua-elastic\[cuda12\]"),
        (able("h 1", version=23004), r"members have NCCL 2\.27\.7 and 2\.30\.4; install the same"),
        (able("h 0"), r"global ranks \[0, 1\] use one GPU \(h 0\), .*NCCL_HOSTID"),
        (able("h 0", may_share=True), r"global ranks \[0, 1\] use one GPU"),
    ],
)
def test_one_that_cannot_takes_all_to_gloo_and_people_are_told(odd: Statement, words: str) -> None:
    choice = choose([able("h 0"), odd, able("h 2")])
    assert not choice.is_nccl and choice.is_notable and not choice.is_refused
    assert re.search(words, choice.reason), choice.reason


def test_ranks_may_share_a_gpu_where_nccl_lets_all_of_them() -> None:
    assert choose([able("h 0", may_share=True), able("h 0", may_share=True)]).is_nccl


def test_a_worker_that_asked_for_gloo_is_not_warned_of_it() -> None:
    choice = choose([able("h 0"), Statement(GLOO, True)])
    assert not choice.is_nccl and not choice.is_notable
    assert "BAGUA_TRANSPORT=gloo on global ranks [1]" in choice.reason


@pytest.mark.parametrize("odd", [NO_GPU, NO_CUPY, able("h 0"), Statement(GLOO, True)])
def test_insisting_where_it_cannot_be_is_refused(odd: Statement) -> None:
    choice = choose([able("h 0", NCCL), odd])
    assert choice.is_refused and not choice.is_nccl
    assert choice.reason.startswith("BAGUA_TRANSPORT=nccl (global ranks [0]) can't be: ")


def test_insisting_without_anything_on_a_gpu_is_refused() -> None:
    choice = choose([Statement(NCCL), Statement(NCCL)])
    assert choice.is_refused and "had nothing on a GPU" in choice.reason


@given(st.lists(STATEMENTS, min_size=1, max_size=4))
def test_it_is_nccl_only_if_no_member_is_against(said: list[Statement]) -> None:
    choice = choose(said)
    if choice.is_nccl:
        assert all(s.uses_gpu and not s.obstacle and s.setting is not GLOO for s in said)
        assert len({s.nccl_version for s in said}) == 1 and not choice.is_refused
    else:
        assert choice.is_refused == any(s.setting is NCCL for s in said)
    assert choice.reason


@given(STATEMENTS)
def test_both_travel_as_text(statement: Statement) -> None:
    assert Statement.from_text(statement.to_text()) == statement
    choice = choose([statement])
    assert Choice.from_text(choice.to_text()) == choice


@pytest.mark.parametrize("text", ["", "[]", '{"setting": "auto", "more": 1}', '{"setting": "tcp"}', "{}"])
def test_what_is_no_statement_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Statement.from_text(text)


def test_a_setting_that_is_none_is_named_with_what_it_may_be() -> None:
    assert Setting.read("gloo") is GLOO
    with pytest.raises(ValueError, match=r"^BAGUA_TRANSPORT='tcp' is none of auto, gloo, nccl$"):
        Setting.read("tcp")
