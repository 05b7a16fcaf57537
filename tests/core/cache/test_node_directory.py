"""A node's directory lives as long as its users, whatever ends them, and belongs to one user of the machine alone."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from bagua_core.cache import node_directory
from bagua_core.cache.errors import StoreFault
from bagua_core.cache.node_directory import enter, sweep

FORK = multiprocessing.get_context("fork")


class User:
    """A process that uses the directory until it receives the request to leave, or is killed."""

    def __init__(self, base: Path, name: str) -> None:
        self._in, self._go = FORK.Event(), FORK.Event()
        self.process = FORK.Process(target=self._use, args=(base, name))
        self.process.start()
        assert self._in.wait(20)

    def _use(self, base: Path, name: str) -> None:
        one = enter(base, name)
        (one.path / "content").write_text("x")
        self._in.set()
        self._go.wait()
        one.leave()

    def leave(self) -> None:
        self._go.set()
        self.process.join(20)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join(20)


@pytest.fixture
def room(room: Path) -> Path:
    """The base, which is made when it is needed and goes with the last of all."""
    return room / "base"


def test_the_last_user_removes_it(room: Path) -> None:
    first, second = enter(room, "a"), enter(room, "a")
    (first.path / "content").touch()
    assert not first.leave() and second.path.exists()
    assert second.leave() and not second.path.exists()
    assert not second.leave(), "leaving twice is nothing"
    assert not room.exists()


def test_the_last_process_removes_it(room: Path) -> None:
    users = [User(room, "a") for _ in range(3)]
    for user in users:
        assert (room / "a" / "content").exists()
        user.leave()
    assert not room.exists()


def test_what_killed_users_left_is_removed_by_the_next_starter(room: Path) -> None:
    user = User(room, "killed")
    alive = enter(room, "alive")
    assert sweep(room) == [], "both have users"
    user.kill()
    (room / ".removed-half-1-1").mkdir()  # its remover was killed before the end
    one = enter(room, "another")
    assert {path.name for path in room.iterdir()} == {"alive", "another"}
    one.leave(), alive.leave()


def test_the_next_of_the_same_run_finds_what_a_killed_user_had(room: Path) -> None:
    User(room, "a").kill()
    one = enter(room, "a")
    assert (one.path / "content").read_text() == "x"
    one.leave()


def test_a_forked_child_ends_nothing(room: Path) -> None:
    one = enter(room, "a")
    child = os.fork()
    if child == 0:
        one.leave()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert one.path.exists() and sweep(room) == []
    assert one.leave() and not room.exists()


def test_one_that_goes_while_another_comes(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last user removes it just after the next has opened its file: that lock would be on a file that is gone."""
    last = enter(room, "a")
    take = node_directory._take

    def take_late(descriptor: int, how: int) -> bool:
        monkeypatch.setattr(node_directory, "_take", take)
        assert last.leave()
        return take(descriptor, how)

    monkeypatch.setattr(node_directory, "_take", take_late)
    one = enter(room, "a")
    assert (one.path / "users").exists() and one.path.exists()
    assert one.leave()


def come_and_go(base: Path) -> None:
    for _ in range(100):
        one = enter(base, "a")
        assert (one.path / "users").exists()
        one.leave()


def test_many_come_and_go_at_once(room: Path) -> None:
    users = [FORK.Process(target=come_and_go, args=(room,)) for _ in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join(60)
        assert user.exitcode == 0
    assert not room.exists()


def test_other_users_directories_and_links_are_refused(room: Path) -> None:
    room.mkdir()
    (room / "open").mkdir(mode=0o755)
    with pytest.raises(StoreFault, match="of this user alone"):
        enter(room / "open", "a")
    (room / "theirs").mkdir(mode=0o700)
    os.chown(room / "theirs", 12345, 12345)
    with pytest.raises(StoreFault, match="of this user alone"):
        enter(room / "theirs", "a")
    (room / "elsewhere").mkdir(mode=0o700)
    (room / "base").mkdir(mode=0o700)
    (room / "base" / "a").symlink_to(room / "elsewhere")
    with pytest.raises(StoreFault, match="of this user alone"):
        enter(room / "base", "a")
    (room / "base" / "b").mkdir(mode=0o700)
    (room / "base" / "b" / "users").symlink_to(room / "elsewhere" / "made")
    with pytest.raises(OSError, match="symbolic links"):
        enter(room / "base", "b")
    assert list((room / "elsewhere").iterdir()) == []
