"""Logs of a removed job go; those of another of its name, and whatever is not the node's own, stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.service.logs.kept_logs import KeptLogs, owners_folder


class Node:
    def __init__(self, folder: Path, name: str = "n0") -> None:
        self.logs = KeptLogs(owners_folder(str(folder / "state")), folder / "log", name)
        self.directory = folder / "log" / "demo" / name

    def write(self) -> None:
        worker = self.directory / "slot0-w"
        worker.mkdir(parents=True)
        (worker / "stdout.log").write_text("line\n")


def test_they_go_with_their_submission_alone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.logs.begin("demo", "one")
    node.write()
    assert not node.logs.remove("demo", "another") and node.directory.exists()
    node.logs.begin("demo", "one")  # started again
    assert node.directory.exists()
    assert node.logs.remove("demo", "one")
    assert not node.directory.parent.exists()
    assert not node.logs.remove("demo", "one"), "nothing is left to remove"


def test_the_next_of_its_name_finds_an_empty_directory_and_keeps_its_own(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.logs.begin("demo", "one")
    node.write()
    node.logs.begin("demo", "two")
    assert not node.directory.exists()
    node.write()
    assert not node.logs.remove("demo", "one"), "the removal of the first is heard late"
    assert node.directory.exists()


def test_those_of_a_submission_that_is_not_known_for_long_go(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.logs.begin("demo", "one")
    node.write()
    record = owners_folder(str(tmp_path / "state")) / "demo"
    for known in ({("demo", "one")}, {("demo", "")}):
        os.utime(record, (0.0, 0.0))
        assert node.logs.tidy(known, 60.0, 1000.0) == ([], []), "known"
    assert node.logs.tidy({("demo", "two")}, 60.0, 1060.0) == ([], []), "known a minute ago"
    assert node.directory.exists()
    assert node.logs.tidy({("demo", "two")}, 60.0, 1061.0) == (["demo"], [])
    assert not node.directory.exists() and not record.exists()


def test_other_nodes_logs_in_a_shared_directory_stay(tmp_path: Path) -> None:
    node, other = Node(tmp_path), Node(tmp_path, "n1")
    node.logs.begin("demo", "one")
    node.write()
    other.write()
    assert node.logs.remove("demo", "one")
    assert not node.directory.exists() and other.directory.exists()


@pytest.mark.parametrize("planted", ["job", "node"])
def test_a_link_is_not_followed(tmp_path: Path, planted: str) -> None:
    node = Node(tmp_path)
    node.logs.begin("demo", "one")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "n0" / "precious").mkdir(parents=True)
    (tmp_path / "log").mkdir()
    if planted == "job":
        node.directory.parent.symlink_to(elsewhere)
    else:
        node.directory.parent.mkdir()
        node.directory.symlink_to(elsewhere / "n0")
    with pytest.raises(InfrastructureLost, match="its logs on this node are not"):
        node.logs.remove("demo", "one")
    assert (elsewhere / "n0" / "precious").exists()
    with pytest.raises(InfrastructureLost, match="can't begin here"):
        node.logs.begin("demo", "two")
    removed, [(job_id, why)] = node.logs.tidy((), 0.0, time.time() + 1.0)
    assert (removed, job_id) == ([], "demo") and "own directory" in why
    assert (elsewhere / "n0" / "precious").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another account")
def test_another_accounts_directory_is_not_removed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.logs.begin("demo", "one")
    node.write()
    os.chown(node.directory, 12345, 12345)
    with pytest.raises(InfrastructureLost):
        node.logs.remove("demo", "one")
    assert node.directory.exists()
