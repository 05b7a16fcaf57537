"""Every option of bagua-launch and bagua-agent is named on a page, not in the generated reference alone."""

from __future__ import annotations

import re

import click
import pytest

from bagua_agent.service.main import cli as agent_cli
from bagua_launch.main import cli as launch_cli
from tests.docs.page_blocks import ROOT
from tests.docs.test_names import tracked

PAGES = [
    path
    for path in tracked()
    if path in ("README.md", "deploy/README.md") or (path.startswith("docs/") and path.endswith(".md"))
]
TEXT = "\n".join((ROOT / path).read_text() for path in PAGES if not path.startswith("docs/design/"))


@pytest.mark.parametrize("group", [launch_cli, agent_cli], ids=["bagua-launch", "bagua-agent"])
def test_every_option_is_named_on_a_page(group: click.Command) -> None:
    assert isinstance(group, click.Group)
    options = {
        tuple(name for name in option.opts if name.startswith("--")): command
        for command, its in group.commands.items()
        for option in its.params
        if isinstance(option, click.Option) and not option.hidden
    }
    assert len(options) > 10
    unnamed = {
        names[0]: command
        for names, command in options.items()
        if not any(re.search(re.escape(name) + r"(?![\w-])", TEXT) for name in names)
    }
    assert unnamed == {}
