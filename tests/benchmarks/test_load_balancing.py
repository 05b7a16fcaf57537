"""The benchmark of balanced work, in short: its texts, its arithmetic, and one real job of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import load_balancing
from benchmarks.load_balancing import Split, Trial, misses, splits_of, throughput_rows
from benchmarks.load_balancing_texts import VOCABULARY, docstrings, texts


def test_texts_are_the_same_every_time_and_of_heavy_tails() -> None:
    assert docstrings(50) == docstrings(50)
    for name in ("docstrings", "pareto", "log-normal"):
        found = texts(name, 300)
        assert found == texts(name, 300) and len(found) == 300
        assert all(0 <= word < VOCABULARY for text in found for word in text)
        lengths = sorted(len(text) for text in found)
        assert lengths[0] >= 1 and lengths[-1] > 5 * lengths[150]
    with pytest.raises(ValueError, match="'uniform' is none of"):
        texts("uniform", 3)


def test_balancing_is_shown_where_plain_sampling_is_uneven() -> None:
    lengths = [len(text) for text in texts("pareto", 3000)]
    splits = splits_of("pareto", lengths, 4, 64)
    means = {s.name: sum(s.imbalances) / len(s.imbalances) for s in splits}
    assert means["plain"] > load_balancing.UNBALANCED
    assert means["balanced, 16 similar batches"] < load_balancing.GOOD
    assert all(s.floor <= means[s.name] + 1e-9 and s.slower >= 1 for s in splits)
    assert not misses(splits)
    bad = Split("pareto", 4, "balanced, 16 similar batches", [1.2], 1.0, 1.2)
    assert misses([splits[0], bad]) == ["pareto, 4 workers: 1.200"]
    assert not misses([Split("pareto", 4, "plain", [1.4], 1.0, 1.4), bad])


def test_rows_are_ratios_of_medians() -> None:
    trials = [Trial("t", 2, 0.0, s, w, 1.5) for s, w in (("ddp", 1e3), ("elastic", 3e3), ("ddp", 3e3))]
    rows = throughput_rows(trials)
    assert [(row[2], row[-1]) for row in rows] == [("ddp", "1.00x"), ("elastic", "1.50x")]


@pytest.mark.usefixtures("forked_starts")
@pytest.mark.parametrize("system", ["ddp, balanced sampler", "elastic, similar"])
def test_a_short_run(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--part", "throughput", "--texts", "pareto", "--count", "1200", "--steps", "4", "--repeat", "1"]
    assert load_balancing.main([*words, "--workers", "2", "--system", system]) == 0
    said = capsys.readouterr().out
    assert f"| pareto | 2       | {system}" in said and "1.00x" in said


def test_keeping_writes_where_results_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_balancing.result_file, "RESULTS", tmp_path)
    monkeypatch.setattr(load_balancing.result_file, "ROOT", tmp_path)
    words = ["--part", "imbalance", "--texts", "log-normal", "--count", "2000", "--keep"]
    assert load_balancing.main(words) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".png"}
