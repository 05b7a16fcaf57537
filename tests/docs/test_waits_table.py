"""The table of --rdzv-conf's keys in the manual has every key that has an effect, with its default."""

from __future__ import annotations

import re
from dataclasses import fields

from bagua_agent.config.job_config import JobConfig
from bagua_launch.rendezvous_request import _CONF_KEYS, _MAY_BE_WITHOUT_LIMIT, FORMS, IS_HOST, parse_conf
from bagua_launch.written_values import WrittenValue
from tests.docs.page_blocks import ROOT

NONE = "`none`"


def table() -> dict[str, str]:
    """The default in each row, by key."""
    section = (ROOT / "docs/training-script.md").read_text().partition("\n### Waits of a job\n")[2]
    section = section.partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| `")]
    return {key: row[1] for row in rows for key in re.findall(r"`(\w+)`", row[0])}


def test_every_key_with_an_effect_has_a_row() -> None:
    assert set(table()) == {key for key, name in _CONF_KEYS.items() if name} | {IS_HOST}


def test_the_forms_of_is_host_are_those_of_the_code() -> None:
    text = (ROOT / "docs/training-script.md").read_text()
    (row,) = re.findall(rf"^\| `{IS_HOST}` \|.*$", text, re.MULTILINE)
    yes, _, no = row.partition("`--rdzv-endpoint`:")[2].partition(", or ")
    assert {True: tuple(re.findall("`(\\w+)`", yes)), False: tuple(re.findall("`(\\w+)`", no))} == FORMS


def test_defaults_and_keys_without_limit_are_those_of_the_code() -> None:
    defaults = {field.name: field.default for field in fields(JobConfig)}
    for key, shown in table().items():
        if key == IS_HOST:
            continue
        (name,) = parse_conf(WrittenValue(f"{key}=7", "--rdzv-conf")).fields
        default = defaults[name]
        texts = [NONE if default is None else f"{default:g} s"]
        if default is not None and name in _MAY_BE_WITHOUT_LIMIT:
            texts.append(NONE)
        assert shown == ", or ".join(texts), key
