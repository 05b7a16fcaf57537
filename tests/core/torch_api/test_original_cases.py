"""The original's own tests of training, in a job of two workers on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.launched import launch

RANK = Path(__file__).with_name("original_cases_rank.py")


@pytest.mark.parametrize(
    "cases",
    [
        (
            "gradient_allreduce_is_the_mean_gradient",
            "two_models_take_turns",
            "an_optimizer_is_fused_after_the_model_was_wrapped",
            "a_copy_trains_by_itself",
        ),
        ("decentralized_averages_weights", "optimizers_begin_with_rank_0s_state"),
        ("asynchronous_averaging_is_aborted_and_resumed",),
    ],
    ids=["gradients", "weights", "background"],
)
def test_two_workers(cases: tuple[str, ...], tmp_path: Path) -> None:
    ended = launch("--standalone", "--nproc-per-node", "2", str(RANK), str(tmp_path), *cases)
    assert ended.returncode == 0, ended.said
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{case}-{rank}" for case in cases for rank in (0, 1)
    }
