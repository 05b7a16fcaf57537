"""The scaling study in its short form, and what it says of published points."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from bagua_core.communication.reduction.buckets import plan_buckets
from benchmarks.scaling import end_to_end, presets, published, report, study
from benchmarks.scaling.__main__ import main
from benchmarks.scaling.life.membership import Membership
from benchmarks.scaling.life.recovery import SYSTEMS
from benchmarks.scaling.steps.timeline import within_node_s
from tests.docs.printed import printed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"


def test_the_short_form_reports_every_part(kept_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, *words = printed("docs/scaling.md", "benchmarks.scaling --keep")[1:]
    assert module == "benchmarks.scaling" and main([*words, "--quick"]) == 0
    assert {path.suffix for path in kept_in.iterdir()} == {".md", ".json", ".png"}
    told = capsys.readouterr().out
    for part in (
        "## Steps and efficiency",
        "## Goodput under failures",
        "### 64 nodes with a failure of each a day",
        "## Published points",
        "## Whole trainings",
        "streaming_diloco_int4",
    ):
        assert part in told
    main(["--quick"])
    assert told.startswith(capsys.readouterr().out)  # a seed repeats every number


def test_most_published_points_are_close() -> None:
    """Of those that determined no constant of the simulated cluster."""
    found = published.points()
    free = [p for p in found if not p.is_fitted]
    assert len(free) > 20
    assert sum(abs(p.ratio - 1) <= report.CLOSE for p in free) >= 0.6 * len(free)
    times = published.speedups(found, "BERT-Large", "1 Gbit/s")
    assert times["bytegrad"][0] == pytest.approx(3.7, abs=0.05)  # the published 3.7 times
    assert times["bytegrad"][1] == pytest.approx(3.7, rel=0.1)


def test_the_page_explains_each_published_point_that_is_not_close() -> None:
    table = PAGE.read_text().partition("| prediction | over published |")[2].partition("\n\n")[0]
    _, _, *rows = (line.split("|") for line in table.splitlines())
    explained = {row[1].strip(): row[2].strip() for row in rows}
    far = [p for p in published.points() if not p.is_fitted and abs(p.ratio - 1) > report.CLOSE]
    assert explained == {f"{p.model}, {p.condition}, {p.algorithm}": f"{p.ratio:.2f}" for p in far}


def test_the_figures_of_those_explanations() -> None:
    found = {(p.model, p.condition, p.algorithm): p for p in published.points()}
    fast, slow, latent = "100 Gbit/s", "1 Gbit/s", "100 Gbit/s, 5 ms"

    def bert(condition: str, algorithm: str) -> published.Point:
        return found["BERT-Large", condition, algorithm]

    whole = found["VGG16", "10 Gbit/s", "low_precision_decentralized"]
    assert whole.network_s == pytest.approx(0.24, abs=0.005)
    assert whole.published_s - whole.network_s == pytest.approx(0.02, abs=0.005)
    ring = bert(fast, "low_precision_decentralized")
    assert (ring.network_s, ring.without_network_s) == pytest.approx((0.22, 0.59), abs=0.005)
    assert ring.without_network_s < ring.published_s < ring.predicted_s
    buckets = len(plan_buckets(presets.bert_large().load.model.specs(), 10 << 20, 10 << 20))
    for algorithm, latencies, of_a_bucket in (
        ("low_precision_decentralized", 139, 2),
        ("decentralized_shift_one", 577, 8),
    ):
        waits = (bert(latent, algorithm).published_s - bert(fast, algorithm).published_s) / 5e-3
        assert (buckets, round(waits), round(waits / buckets)) == (73, latencies, of_a_bucket)
        assert bert(latent, algorithm).predicted_s - bert(fast, algorithm).predicted_s < 2 * 5e-3
    pairs, compute_s = bert(fast, "decentralized_shift_one"), presets.bert_large().load.compute_s
    sent = presets.bert_large().load.model.size_bytes
    inside_s = within_node_s(presets.seeds_cluster(presets.bert_large(), 100), sent, 3)
    assert pairs.predicted_s - compute_s + inside_s < 0.05, "copies, and three stages within the node"
    assert pairs.network_s == pytest.approx(0.45, abs=0.005)
    assert pairs.published_s - compute_s == pytest.approx(0.20, abs=0.005)
    assert sent / bert(slow, "decentralized_shift_one").published_s == pytest.approx(0.102e9, rel=0.01)
    assert 2 * 15 / 16 * sent / bert(slow, "ddp").published_s == pytest.approx(0.112e9, rel=0.01)
    missing_s = (
        bert(slow, "decentralized_shift_one").published_s - bert(slow, "decentralized_shift_one").predicted_s
    )
    assert missing_s == pytest.approx(1.8, abs=0.05) and compute_s < 0.53
    one_bit = bert(latent, "qadam_1bit")
    assert one_bit.predicted_s - one_bit.without_network_s == pytest.approx(0.03, abs=0.005)
    sums = bert(slow, "qadam_1bit")
    assert (sums.network_s, sums.without_network_s) == pytest.approx((0.67, 0.58), abs=0.005)
    assert sums.published_s == pytest.approx(0.65, abs=0.005)
    assert found["VGG16", "10 Gbit/s", "bytegrad"].network_s == pytest.approx(0.22, abs=0.005)
    assert found["VGG16", fast, "bytegrad"].ratio == pytest.approx(0.84, abs=0.005)


def test_rates_over_tcp_that_repeat_published_steps() -> None:
    *fitted, pairs = published.tcp_rates().values()
    assert fitted == pytest.approx([2.6e9, 2.9e9, 3.7e9], rel=0.02)
    assert statistics.fmean(fitted) == pytest.approx(presets.TCP_BYTES_PER_S, rel=0.05)
    assert pairs == pytest.approx(2.0e9, rel=0.03)


def test_the_published_gain_lies_between_those_over_ddp_and_over_sixteen_bits() -> None:
    """At 100 Gbit/s, where it was published, of the model with the larger gain."""
    found = [gain for gain in end_to_end.gains() if gain.gbit == 100]
    assert {gain.model for gain in found} == {"VGG16", "BERT-Large"}
    largest = max(found, key=lambda gain: gain.over_ddp)
    assert largest.over_fp16 < end_to_end.PUBLISHED_GAIN < largest.over_ddp


def test_a_study_of_a_sharded_model_has_the_algorithms_that_it_can_use() -> None:
    sharded = presets.llama_7b()
    points = study.sweep((sharded,), presets.LINKS[:1], (8,))
    assert [p.algorithm for p in points] == list(study.SHARDED)
    by_name = {p.algorithm: p for p in points}
    # both directions of the ring for 13.5 GB of gradients at 1.19 GB/s, less what backward hides
    assert by_name["ddp"].step_s == pytest.approx(2 * 7 / 8 * 13.477e9 / (1.25e9 * 0.95), rel=0.05)
    assert by_name["streaming_diloco_int4"].efficiency > 0.9


def test_failures_cost_a_system_that_restarts_the_most() -> None:
    """Of every model, on every network over TCP."""
    sharded, bert = presets.llama_7b(), presets.bert_large()
    lives = study.lives((sharded, bert), sizes=(16,), silent_shares=(0.0,), failures=12)
    assert {(e.model, e.link) for e in lives} == {
        (case.name, link) for case in (sharded, bert) for link in ("10 Gbit/s", "25 Gbit/s", "100 Gbit/s")
    }
    goodput = {(e.model, e.link, e.rate, e.system): e.account.goodput for e in lives}
    assert len(goodput) == len(lives) == 2 * 3 * len(study.FAILURES) * 3
    for model, link in dict.fromkeys((e.model, e.link) for e in lives):
        daily = {system: goodput[model, link, "day", system] for system in SYSTEMS}
        assert daily["torchrun"] < daily["torchft"] <= daily["bagua"] < 1
        assert all(daily[system] < goodput[model, link, "month", system] for system in SYSTEMS)
    # a joiner copies 81 GB of the sharded model, and 4 GB of the other
    assert (
        goodput[sharded.name, "10 Gbit/s", "day", "bagua"] < goodput[bert.name, "10 Gbit/s", "day", "bagua"]
    )


def test_all_models_meet_the_same_failures_which_the_leader_decides_about_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formed: list[int] = []

    class Counted(Membership):
        def __init__(self, nodes: int) -> None:
            formed.append(nodes)
            super().__init__(nodes)

    monkeypatch.setattr(study, "Membership", Counted)
    cases = (presets.vgg16(), presets.bert_large())
    lives = study.lives(cases, presets.LINKS[:2], (8,), failures=12)
    assert formed == [8] * len(study.FAILURES)
    for rate in study.FAILURES:
        of_bagua = [e.account for e in lives if (e.system, e.rate) == ("bagua", rate)]
        assert len({(account.losses, account.joins) for account in of_bagua}) == 1 < len(of_bagua)


def test_steps_of_a_sweep_need_not_be_simulated_again() -> None:
    case, link = presets.vgg16(), presets.LINKS[0]
    known = study.step_times(study.sweep((case,), (link,), (8,), seed=3))
    assert list(known) == [(case.name, link.name, 8)]
    assert study.shape_of(case, link, 8, seed=3, known=known) == study.shape_of(case, link, 8, seed=3)
    assert study.shape_of(case, link, 8, known={(case.name, link.name, 8): 2.5}).step_s == 2.5


def test_a_slow_node_costs_less_where_the_network_is_the_bottleneck() -> None:
    slow = {name: times for name, _, times in study.stragglers(presets.vgg16(), presets.LINKS[0], 8, 1.5)}
    assert slow["ddp"] < slow["async"] < 1.51


def test_a_vote_beside_the_buckets_costs_less_than_one_behind_the_exchange() -> None:
    votes = {
        name: flat - leaders
        for name, flat, leaders in study.vote_of_leaders(presets.vgg16(), presets.LINKS[0], 64)
    }
    assert "ddp" not in votes
    # Buckets travel for longer than the vote
    assert votes["gradient_allreduce"] == pytest.approx(0.0, abs=1e-6)
    assert votes["async"] == pytest.approx(2 * 511 / 512 * 448 * presets.INSIDE_NODE_S, rel=0.05)
