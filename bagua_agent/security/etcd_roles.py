"""Decides the users, roles and permissions of etcd, so that no client can do more than its certificate says.

etcd takes the common name of a client's certificate for its user. Pure: `plan` returns what is missing of what should
be; etcd_role_writer.py reads and writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from google.protobuf.message import Message  # type: ignore[import-untyped,unused-ignore]

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.key_range import decode_key, encode_key, end_of_prefix
from bagua_agent.security.certificates import ROOT_NAME, Holder, Role
from bagua_contract import etcd_pb2 as pb

PREFIX = "/bagua/v1/"
SECRETS = "/bagua/secrets/v1/"  # what jobs' agents may know and viewers may not
ROOT_ROLE = "root"  # etcd's own: everything, without permissions to name


class Access(Enum):
    READ = pb.Permission.READ
    WRITE = pb.Permission.WRITE
    READ_WRITE = pb.Permission.READWRITE


@dataclass(frozen=True, slots=True)
class Permission:
    """A permission on keys from start up to end, both bytes as etcd has them; no end: on the key `start` alone."""

    access: Access
    start: bytes
    end: bytes

    def to_proto(self) -> pb.Permission:
        return pb.Permission(permType=self.access.value, key=self.start, range_end=self.end)

    def __str__(self) -> str:
        return f"{self.access.name.lower().replace('_', ' and ')} {decode_key(self.start)}*"


def permission_on_prefix(access: Access, prefix: str) -> Permission:
    return Permission(access, encode_key(prefix), end_of_prefix(prefix))


# A node's agents write members, generations and events, and after a wiped etcd all keys that they remember.
# Members of etcd are not clients, so their certificates give access to no key.
_EVERYTHING = tuple(permission_on_prefix(Access.READ_WRITE, prefix) for prefix in (PREFIX, SECRETS))
PERMISSIONS: Mapping[Role, tuple[Permission, ...]] = {
    Role.OPERATOR: _EVERYTHING,
    Role.AGENT: _EVERYTHING,
    Role.VIEWER: (permission_on_prefix(Access.READ, PREFIX),),
}


def etcd_role(role: Role) -> str:
    """Returns etcd's name for a role."""
    return f"bagua-{role}"


@dataclass(frozen=True, slots=True)
class EtcdRights:
    """The rights that etcd holds. enabled: whether authentication is in force; before, every client may do
    everything."""

    enabled: bool = False
    roles: Mapping[str, frozenset[Permission]] = field(default_factory=dict)
    users: Mapping[str, frozenset[str]] = field(default_factory=dict)  # name: roles


@dataclass(frozen=True, slots=True)
class AuthCall:
    """One call of etcd's Auth service. text: what it does, for a person."""

    method: str
    request: Message
    text: str

    def __str__(self) -> str:
        return self.text


def plan(present: EtcdRights, holders: Iterable[Holder], retired: Iterable[str] = ()) -> tuple[AuthCall, ...]:
    """Returns the steps that lead from `present` to the rights of `holders`, in the order in which they must be done.

    Users that are neither holders nor retired stay as they are, as do roles that are not ours. Raises UserError if a
    holder is retired too.
    """
    wanted = {holder.name: holder.role for holder in holders if holder.role in PERMISSIONS}
    retired = sorted(set(retired))
    for name in retired:
        if name in wanted or name == ROOT_NAME:
            raise UserError(f"etcd user {name!r} can't be both retired and in use; name it once")
    return (
        *_role_steps(present),
        *_user_steps(present, wanted),
        *(
            AuthCall("UserDelete", pb.AuthUserDeleteRequest(name=name), f"user {name} removed")
            for name in retired
            if name in present.users
        ),
        # Last: once it is in force, only root can mend what is missing.
        *(
            ()
            if present.enabled
            else (AuthCall("AuthEnable", pb.AuthEnableRequest(), "authentication enabled"),)
        ),
    )


def _role_steps(present: EtcdRights) -> list[AuthCall]:
    steps: list[AuthCall] = []
    for role, permissions in PERMISSIONS.items():
        name = etcd_role(role)
        held = present.roles.get(name)
        if held is None:
            steps.append(AuthCall("RoleAdd", pb.AuthRoleAddRequest(name=name), f"role {name} added"))
        # What goes, goes first: etcd keeps one permission a range, and granting replaces it.
        wrong = (held or frozenset()) - set(permissions)
        ranges = {(permission.start, permission.end) for permission in permissions}
        same_range = {other for other in wrong if (other.start, other.end) in ranges}
        for other in sorted(wrong - same_range, key=str):
            revoke = pb.AuthRoleRevokePermissionRequest(role=name, key=other.start, range_end=other.end)
            steps.append(AuthCall("RoleRevokePermission", revoke, f"role {name} may no more {other}"))
        for one in permissions:
            if one not in (held or ()):
                grant = pb.AuthRoleGrantPermissionRequest(name=name, perm=one.to_proto())
                steps.append(AuthCall("RoleGrantPermission", grant, f"role {name} may {one}"))
    return steps


def _user_steps(present: EtcdRights, wanted: Mapping[str, Role]) -> list[AuthCall]:
    ours = {etcd_role(role) for role in PERMISSIONS}
    steps: list[AuthCall] = []
    for name, role in sorted({ROOT_NAME: Role.OPERATOR, **wanted}.items()):
        held = present.users.get(name)
        if held is None:
            # Without a password: a certificate is the only way in.
            add = pb.AuthUserAddRequest(name=name, options=pb.UserAddOptions(no_password=True))
            steps.append(AuthCall("UserAdd", add, f"user {name} added"))
        roles = {ROOT_ROLE} if name == ROOT_NAME else {etcd_role(role)}
        for other in sorted(((held or set()) & ours) - roles):
            revoke = pb.AuthUserRevokeRoleRequest(name=name, role=other)
            steps.append(AuthCall("UserRevokeRole", revoke, f"user {name} has role {other} no more"))
        for other in sorted(roles - (held or set())):
            grant = pb.AuthUserGrantRoleRequest(user=name, role=other)
            steps.append(AuthCall("UserGrantRole", grant, f"user {name} has role {other}"))
    return steps
