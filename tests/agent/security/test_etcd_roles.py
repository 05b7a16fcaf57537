"""The steps from etcd's present users and rights to the wanted ones."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.security.certificates import Holder, Role
from bagua_agent.security.etcd_roles import (
    PERMISSIONS,
    Access,
    AuthCall,
    EtcdRights,
    Permission,
    permission_on_prefix,
    plan,
)
from bagua_contract import etcd_pb2 as pb

LATER = datetime(2040, 1, 1, tzinfo=UTC)


def holder(name: str, role: Role) -> Holder:
    return Holder(name, role, LATER)


EVERYBODY = (
    holder("ann", Role.OPERATOR),
    holder("vic", Role.VIEWER),
    holder("node-1", Role.AGENT),
    holder("bagua-etcd", Role.ETCD),
)


def after(rights: EtcdRights, steps: tuple[AuthCall, ...]) -> EtcdRights:
    """What etcd would hold; refuses what etcd refuses."""
    enabled = rights.enabled
    roles = {name: set(held) for name, held in rights.roles.items()}
    users = {name: set(held) for name, held in rights.users.items()}
    for step in steps:
        asked: Any = step.request
        match step.method:
            case "RoleAdd":
                assert asked.name not in roles
                roles[asked.name] = set()
            case "RoleGrantPermission":
                new = Permission(Access(asked.perm.permType), asked.perm.key, asked.perm.range_end)
                same = {p for p in roles[asked.name] if (p.start, p.end) == (new.start, new.end)}
                roles[asked.name] = (roles[asked.name] - same) | {new}
            case "RoleRevokePermission":
                gone = (asked.key, asked.range_end)
                assert gone in {(p.start, p.end) for p in roles[asked.role]}
                roles[asked.role] = {p for p in roles[asked.role] if (p.start, p.end) != gone}
            case "UserAdd":
                assert asked.name not in users and asked.options.no_password
                users[asked.name] = set()
            case "UserDelete":
                del users[asked.name]
            case "UserGrantRole":
                assert asked.role in roles or asked.role == "root"
                users[asked.user].add(asked.role)
            case "UserRevokeRole":
                users[asked.name].remove(asked.role)
            case "AuthEnable":
                assert "root" in users.get("root", ()) and step is steps[-1]
                enabled = True
            case other:
                raise AssertionError(f"etcd has no method {other}")
    return EtcdRights(
        enabled,
        {name: frozenset(held) for name, held in roles.items()},
        {name: frozenset(held) for name, held in users.items()},
    )


def test_an_empty_etcd_gets_everything_and_then_nothing_more() -> None:
    rights = after(EtcdRights(), plan(EtcdRights(), EVERYBODY))
    assert rights.enabled
    assert rights.users == {
        "root": {"root"},
        "ann": {"bagua-operator"},
        "vic": {"bagua-viewer"},
        "node-1": {"bagua-agent"},
    }
    assert rights.roles["bagua-viewer"] == {permission_on_prefix(Access.READ, "/bagua/v1/")}
    assert rights.roles["bagua-operator"] == rights.roles["bagua-agent"]
    assert rights.roles["bagua-operator"] == {
        permission_on_prefix(Access.READ_WRITE, prefix) for prefix in ("/bagua/v1/", "/bagua/secrets/v1/")
    }
    assert plan(rights, EVERYBODY) == ()


def test_only_members_of_etcd_have_no_rights() -> None:
    assert set(Role) - set(PERMISSIONS) == {Role.ETCD}


def test_an_end_at_any_step_is_mended_by_doing_it_again() -> None:
    steps = plan(EtcdRights(), EVERYBODY)
    wanted = after(EtcdRights(), steps)
    for done in range(len(steps)):
        half = after(EtcdRights(), steps[:done])
        assert after(half, plan(half, EVERYBODY)) == wanted


def test_rights_that_grew_by_hand_are_taken_back() -> None:
    good = after(EtcdRights(), plan(EtcdRights(), EVERYBODY))
    everything = Permission(Access.READ_WRITE, b"\0", b"\0")
    too_much = permission_on_prefix(Access.READ_WRITE, "/bagua/v1/")
    bent = EtcdRights(
        True,
        {**good.roles, "bagua-viewer": frozenset({everything, too_much}), "theirs": frozenset({everything})},
        {
            **good.users,
            "vic": frozenset({"bagua-viewer", "bagua-operator", "theirs"}),
            "bob": frozenset({"theirs"}),
        },
    )
    mended = after(bent, plan(bent, EVERYBODY))
    assert mended.roles == {**good.roles, "theirs": frozenset({everything})}
    assert mended.users == {**good.users, "vic": {"bagua-viewer", "theirs"}, "bob": {"theirs"}}


def test_who_has_no_certificate_any_more_keeps_its_user_until_it_is_retired() -> None:
    rights = after(EtcdRights(), plan(EtcdRights(), EVERYBODY))
    assert plan(rights, EVERYBODY[1:]) == ()
    assert plan(rights, EVERYBODY[1:], retired=["ann", "never-seen"]) == (
        AuthCall("UserDelete", pb.AuthUserDeleteRequest(name="ann"), "user ann removed"),
    )


@pytest.mark.parametrize("name", ["ann", "root"])
def test_no_name_is_both_retired_and_in_use(name: str) -> None:
    with pytest.raises(UserError, match=f"'{name}' can't be both retired and in use"):
        plan(EtcdRights(), EVERYBODY, retired=[name])
