"""Options of autotuning become fields of the job, of one that is started by hand and of one that is submitted."""

from __future__ import annotations

import pytest

from bagua_agent.config.job_config import JobConfig
from bagua_agent.config.job_config_file import SUBMITTED, decode
from bagua_agent.job.create_or_join import autotune_of
from bagua_launch.cluster_options import SUBMIT_OPTIONS
from bagua_launch.cluster_request import parse_submission
from bagua_launch.errors import RequestError
from bagua_launch.job_request import parse_request
from bagua_launch.options import AUTOTUNE_OPTIONS
from bagua_launch.written_values import WrittenValue

ASKED = {
    "autotune_level": "2",
    "autotune_algorithms": "bytegrad,qadam",
    "autotune_max_samples": "9",
    "autotune_sampling_confidence_time": "2.5",
    "autotune_warmup_time": "3",
    "is_output_autotune_log": "true",
}


def said(values: dict[str, str]) -> dict[str, WrittenValue]:
    return {key: WrittenValue(text, "--" + key.replace("_", "-")) for key, text in values.items()}


def submitted(**values: str) -> JobConfig:
    found = parse_submission(
        said(values), ["train.py"], directory="/d", environ={}, submitter="me@here", now_unix_s=1.0
    )
    return decode(found.launch, SUBMITTED, job_id="job")


def test_a_submitted_job_is_tuned_as_one_that_is_started_by_hand() -> None:
    by_hand = parse_request(said(ASKED), ["train.py"]).config
    assert autotune_of(submitted(**ASKED)) == autotune_of(by_hand)
    tuned = autotune_of(by_hand)
    assert tuned is not None
    assert (tuned.level, tuned.max_samples, tuned.confidence_s, tuned.warmup_s) == (2, 9, 2.5, 3.0)
    assert list(tuned.algorithms) == ["bytegrad", "qadam"] and submitted(**ASKED).autotune_verbose
    assert autotune_of(submitted()) is None


def test_submit_has_every_option_of_autotuning() -> None:
    assert {option.key for option in AUTOTUNE_OPTIONS} <= {option.key for option in SUBMIT_OPTIONS}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"autotune_level": "1", "autotune_algorithms": "bytegrad"}, "algorithms are tried at level 2 alone"),
        (
            {"autotune_level": "2", "autotune_algorithms": "local_sgd"},
            "no running job can take algorithm 'local_sgd'",
        ),
        ({"autotune_level": "1", "deterministic": "true"}, "there is nothing to tune"),
    ],
)
def test_what_cannot_be_tuned_is_refused(values: dict[str, str], line: str) -> None:
    for parse in (lambda: submitted(**values), lambda: parse_request(said(values), ["train.py"])):
        with pytest.raises(RequestError, match=line):
            parse()
