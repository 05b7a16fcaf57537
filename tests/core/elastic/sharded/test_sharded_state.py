"""Everything that a boundary remembers holds for sharded models: DTensor parameters as fully_shard makes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bagua_core.elastic.state import state_codec
from bagua_core.model.sharded_tensors import Layout
from tests.core.elastic.sharded import gloo_ranks

SCENARIOS = "tests.core.elastic.sharded.state_scenarios"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return gloo_ranks.run(SCENARIOS, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", gloo_ranks.names_in(SCENARIOS))
def test_on_two_shards(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]


GOOD = {
    "shape": [4, 3],
    "stride": [3, 1],
    "placements": ["S(0)"],
    "mesh": [[2], ["shard"], [0, 1]],
    "here": [[1], [2, 0]],
}


@pytest.mark.parametrize(
    "odd",
    [
        {"shape": [4]},
        {"shape": [4, -3]},
        {"shape": [4, 1 << 70]},
        {"shape": [4, True]},
        {"placements": ["S(2)"]},
        {"placements": ["P(sum)"]},
        {"placements": ["__import__('os')"]},
        {"placements": []},
        {"placements": [["S(0)"]]},
        {"mesh": [[2], ["a", "b"], [0, 1]]},
        {"mesh": [[2], ["shard"]]},
        {"mesh": "none"},
        {"stride": None},
        {"here": [[1], [2]]},
        {"here": [[], [2, 0]]},
        {"here": None},
    ],
)
def test_a_manifest_with_an_odd_layout_is_refused(odd: dict[str, object]) -> None:
    manifest, tensors = state_codec.encode({"a": torch.zeros(2, 3)})
    described = json.loads(manifest)
    described["tensors"][0]["sharded"] = {**GOOD, **odd}
    with pytest.raises(ValueError, match="layout"):
        Layout.from_json({**GOOD, **odd})
    with pytest.raises(state_codec.MalformedManifest, match="layout of a sharded tensor"):
        state_codec.decode(json.dumps(described).encode(), list(tensors))


def test_a_layout_is_read_as_it_was_written() -> None:
    layout = Layout.from_json(GOOD)
    assert layout.to_json() == GOOD


def test_the_manifest_of_a_state_without_sharded_tensors_says_nothing_of_shards(tmp_path: Path) -> None:
    manifest, _ = state_codec.encode({"a": torch.zeros(2, 3)})
    assert set(json.loads(manifest)["tensors"][0]) == {"dtype", "shape", "stride", "device"}
