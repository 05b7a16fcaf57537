"""The transport for tensors of a GPU follows from the statements of all members, with a reason."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_core.communication.nccl import nccl_library
from bagua_core.communication.transport_choice import (
    AUTO,
    GLOO,
    Ability,
    Choice,
    Facts,
    Statement,
    check_setting,
    choose,
)
from bagua_core.communication.transports.gpu_transport import NcclTransport
from tests.docs.printed import printed_text

NCCL = "nccl"
TRANSPORTS = [NcclTransport()]


class Other:
    """A further transport, which any two members can use together."""

    name = "other"

    def title(self, said: Sequence[Facts]) -> str:
        return "another transport"

    def against(self, said: Sequence[Facts]) -> str | None:
        return None


def able(gpu: str, setting: str = AUTO, version: int = 22707, may_share: bool = False) -> Statement:
    facts = {"version": str(version), "gpu": gpu, "may_share": "yes" if may_share else ""}
    return Statement(setting, True, {NCCL: Ability("", facts)})


NO_GPU = Statement(AUTO)
NO_CUPY_SAID = "NCCL is used through CuPy; install bagua-elastic[cuda12] or bagua-elastic[cuda13]"
NO_CUPY = Statement(AUTO, True, {NCCL: Ability(NO_CUPY_SAID)})

FACTS = st.fixed_dictionaries(
    {
        "version": st.sampled_from(["22707", "23004"]),
        "gpu": st.sampled_from(["a", "b"]),
        "may_share": st.sampled_from(["", "yes"]),
    }
)
ABILITIES = st.one_of(st.builds(Ability, st.just("no CuPy")), st.builds(Ability, st.just(""), FACTS))
STATEMENTS = st.builds(
    Statement,
    st.sampled_from([AUTO, GLOO, NCCL]),
    st.booleans(),
    st.dictionaries(st.just(NCCL), ABILITIES),
)


def test_all_members_that_can_use_nccl() -> None:
    choice = choose([able("h 0"), able("h 1"), able("i 0")], TRANSPORTS)
    assert choice == Choice(NCCL, "tensors of GPUs travel by NCCL 2.27.7")


def test_a_job_on_the_cpu_hears_nothing_of_it() -> None:
    choice = choose([NO_GPU, NO_GPU], TRANSPORTS)
    assert not choice.transport and not choice.is_notable and not choice.is_refused
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
    choice = choose([able("h 0"), odd, able("h 2")], TRANSPORTS)
    assert not choice.transport and choice.is_notable and not choice.is_refused
    assert re.search(words, choice.reason), choice.reason


class WithoutCupy:
    """A finder of modules that finds no CuPy."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "cupy":
            raise ModuleNotFoundError(f"No module named {name!r}")


def test_the_page_prints_what_rank_0_says_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutCupy(), *sys.meta_path])
    nccl_library.load.cache_clear()
    without = Statement(AUTO, True, {NCCL: NcclTransport().ability([torch.device("cuda", 0)])})
    choice = choose([able("h 0"), able("h 1"), without], TRANSPORTS)
    assert choice.is_notable
    assert printed_text("docs/gpu.md", "travel by Gloo") == f"bagua: {choice.reason}\n"


def test_ranks_may_share_a_gpu_where_nccl_lets_all_of_them() -> None:
    assert choose([able("h 0", may_share=True), able("h 0", may_share=True)], TRANSPORTS).transport


def test_a_worker_that_asked_for_gloo_is_not_warned_of_it() -> None:
    choice = choose([able("h 0"), Statement(GLOO, True)], TRANSPORTS)
    assert not choice.transport and not choice.is_notable
    assert "BAGUA_TRANSPORT=gloo on global ranks [1]" in choice.reason


@pytest.mark.parametrize("odd", [NO_GPU, NO_CUPY, able("h 0"), Statement(GLOO, True)])
def test_insisting_where_it_cannot_be_is_refused(odd: Statement) -> None:
    choice = choose([able("h 0", NCCL), odd], TRANSPORTS)
    assert choice.is_refused and not choice.transport
    assert choice.reason.startswith("BAGUA_TRANSPORT=nccl (global ranks [0]) can't be: ")


def test_insisting_without_anything_on_a_gpu_is_refused() -> None:
    choice = choose([Statement(NCCL), Statement(NCCL)], TRANSPORTS)
    assert choice.is_refused and "had nothing on a GPU" in choice.reason


@given(st.lists(STATEMENTS, min_size=1, max_size=4))
def test_it_is_nccl_only_if_no_member_is_against(said: list[Statement]) -> None:
    choice = choose(said, TRANSPORTS)
    if choice.transport:
        facts = [s.abilities[NCCL].facts for s in said]
        assert all(s.uses_gpu and not s.abilities[NCCL].obstacle and s.setting != GLOO for s in said)
        assert len({f["version"] for f in facts}) == 1 and not choice.is_refused
    else:
        assert choice.is_refused == any(s.setting == NCCL for s in said)
    assert choice.reason


def test_the_preferred_transport_that_all_can_use_is_taken() -> None:
    both = replace(able("h 0"), abilities={**able("h 0").abilities, "other": Ability()})
    assert choose([both], [Other(), *TRANSPORTS]).transport == "other"
    assert choose([both], [*TRANSPORTS, Other()]).transport == NCCL
    assert choose([both, both], [*TRANSPORTS, Other()]).transport == "other", (
        "two ranks, one GPU: not by NCCL"
    )
    assert choose([both, able("h 1")], [Other(), *TRANSPORTS]).transport == NCCL


def test_a_transport_that_a_member_has_not_registered_is_named() -> None:
    insisting = Statement("other", True, {"other": Ability()})
    choice = choose([insisting, Statement("other", True)], [Other()])
    assert choice.is_refused and "global ranks [1] have no transport 'other'; register it" in choice.reason


def test_members_that_insist_on_different_transports_are_refused() -> None:
    choice = choose(
        [able("h 0", NCCL), Statement("other", True, {"other": Ability()})], [*TRANSPORTS, Other()]
    )
    assert choice.is_refused and "BAGUA_TRANSPORT=other on global ranks [1]" in choice.reason


@given(STATEMENTS)
def test_both_travel_as_text(statement: Statement) -> None:
    assert Statement.from_text(statement.to_text()) == statement
    choice = choose([statement], TRANSPORTS)
    assert Choice.from_text(choice.to_text()) == choice


@pytest.mark.parametrize("text", ["", "[]", '{"setting": "auto", "more": 1}', '{"abilities": []}', "{}"])
def test_what_is_no_statement_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        Statement.from_text(text)


def test_a_setting_that_is_none_is_named_with_what_it_may_be() -> None:
    assert check_setting(GLOO, TRANSPORTS) == GLOO
    with pytest.raises(ValueError, match=r"^BAGUA_TRANSPORT='tcp' is none of auto, gloo, nccl$"):
        check_setting("tcp", TRANSPORTS)
