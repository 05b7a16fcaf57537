"""Users, roles and permissions of etcd, so that no client can do more than its certificate says.

etcd takes the common name of a client's certificate for its user. Pure: `plan` says what is missing of what should
be; etcd_role_writer.py reads and writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

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
    """On keys from start up to end, both bytes as etcd has them; no end: on the key `start` alone."""

    access: Access
    start: bytes
    end: bytes

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
    """etcd's name for it."""
    return f"bagua-{role}"


@dataclass(frozen=True, slots=True)
class EtcdRights:
    """What etcd holds. enabled: whether it is in force; before, every client may do everything."""

    enabled: bool = False
    roles: Mapping[str, frozenset[Permission]] = field(default_factory=dict)
    users: Mapping[str, frozenset[str]] = field(default_factory=dict)  # name: roles


@dataclass(frozen=True, slots=True)
class AddRole:
    role: str

    def __str__(self) -> str:
        return f"role {self.role} added"


@dataclass(frozen=True, slots=True)
class GrantPermission:
    role: str
    permission: Permission

    def __str__(self) -> str:
        return f"role {self.role} may {self.permission}"


@dataclass(frozen=True, slots=True)
class RevokePermission:
    role: str
    permission: Permission

    def __str__(self) -> str:
        return f"role {self.role} may no more {self.permission}"


@dataclass(frozen=True, slots=True)
class AddUser:
    """Without a password: a certificate is the only way in."""

    user: str

    def __str__(self) -> str:
        return f"user {self.user} added"


@dataclass(frozen=True, slots=True)
class RemoveUser:
    user: str

    def __str__(self) -> str:
        return f"user {self.user} removed"


@dataclass(frozen=True, slots=True)
class GrantRole:
    user: str
    role: str

    def __str__(self) -> str:
        return f"user {self.user} has role {self.role}"


@dataclass(frozen=True, slots=True)
class RevokeRole:
    user: str
    role: str

    def __str__(self) -> str:
        return f"user {self.user} has role {self.role} no more"


@dataclass(frozen=True, slots=True)
class Enable:
    """From now on etcd asks who a client is."""

    def __str__(self) -> str:
        return "authentication enabled"


Step = AddRole | GrantPermission | RevokePermission | AddUser | RemoveUser | GrantRole | RevokeRole | Enable


def plan(present: EtcdRights, holders: Iterable[Holder], retired: Iterable[str] = ()) -> tuple[Step, ...]:
    """What leads from `present` to the rights of `holders`, in the order in which it must be done.

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
        *(RemoveUser(name) for name in retired if name in present.users),
        # Last: once it is in force, only root can mend what is missing.
        *(() if present.enabled else (Enable(),)),
    )


def _role_steps(present: EtcdRights) -> list[Step]:
    steps: list[Step] = []
    for role, permissions in PERMISSIONS.items():
        name = etcd_role(role)
        held = present.roles.get(name)
        if held is None:
            steps.append(AddRole(name))
        # What goes, goes first: etcd keeps one permission a range, and granting replaces it.
        wrong = (held or frozenset()) - set(permissions)
        ranges = {(permission.start, permission.end) for permission in permissions}
        same_range = {other for other in wrong if (other.start, other.end) in ranges}
        steps.extend(RevokePermission(name, other) for other in sorted(wrong - same_range, key=str))
        steps.extend(GrantPermission(name, one) for one in permissions if one not in (held or ()))
    return steps


def _user_steps(present: EtcdRights, wanted: Mapping[str, Role]) -> list[Step]:
    ours = {etcd_role(role) for role in PERMISSIONS}
    steps: list[Step] = []
    for name, role in sorted({ROOT_NAME: Role.OPERATOR, **wanted}.items()):
        held = present.users.get(name)
        if held is None:
            steps.append(AddUser(name))
        roles = {ROOT_ROLE} if name == ROOT_NAME else {etcd_role(role)}
        steps.extend(RevokeRole(name, other) for other in sorted(((held or set()) & ours) - roles))
        steps.extend(GrantRole(name, other) for other in sorted(roles - (held or set())))
    return steps
