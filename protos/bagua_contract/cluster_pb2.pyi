from bagua_contract import membership_pb2 as _membership_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Submission(_message.Message):
    __slots__ = ("protocol", "job_id", "wanted", "min_nodes", "max_nodes", "slots_per_node", "priority", "labels", "user", "directory", "environment", "launch", "submitter", "submitted_unix_s", "nonce", "size_policy", "replica_size", "changes")
    class Wanted(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WANTED_UNSPECIFIED: _ClassVar[Submission.Wanted]
        RUN: _ClassVar[Submission.Wanted]
        STOP: _ClassVar[Submission.Wanted]
    WANTED_UNSPECIFIED: Submission.Wanted
    RUN: Submission.Wanted
    STOP: Submission.Wanted
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    MIN_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_NODE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    SUBMITTER_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_POLICY_FIELD_NUMBER: _ClassVar[int]
    REPLICA_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    job_id: str
    wanted: Submission.Wanted
    min_nodes: int
    max_nodes: int
    slots_per_node: int
    priority: int
    labels: _containers.ScalarMap[str, str]
    user: str
    directory: str
    environment: _containers.ScalarMap[str, str]
    launch: str
    submitter: str
    submitted_unix_s: float
    nonce: str
    size_policy: _membership_pb2.SizePolicy
    replica_size: int
    changes: int
    def __init__(self, protocol: _Optional[int] = ..., job_id: _Optional[str] = ..., wanted: _Optional[_Union[Submission.Wanted, str]] = ..., min_nodes: _Optional[int] = ..., max_nodes: _Optional[int] = ..., slots_per_node: _Optional[int] = ..., priority: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., user: _Optional[str] = ..., directory: _Optional[str] = ..., environment: _Optional[_Mapping[str, str]] = ..., launch: _Optional[str] = ..., submitter: _Optional[str] = ..., submitted_unix_s: _Optional[float] = ..., nonce: _Optional[str] = ..., size_policy: _Optional[_Union[_membership_pb2.SizePolicy, _Mapping]] = ..., replica_size: _Optional[int] = ..., changes: _Optional[int] = ...) -> None: ...

class Removal(_message.Message):
    __slots__ = ("protocol", "job_id", "removed_unix_s")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REMOVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    job_id: str
    removed_unix_s: float
    def __init__(self, protocol: _Optional[int] = ..., job_id: _Optional[str] = ..., removed_unix_s: _Optional[float] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("protocol", "node_name", "address", "slots", "labels", "troubles", "units", "version", "boot_id", "note")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node_name: str
    address: str
    slots: int
    labels: _containers.ScalarMap[str, str]
    troubles: _containers.RepeatedScalarFieldContainer[str]
    units: _containers.RepeatedCompositeFieldContainer[Unit]
    version: str
    boot_id: str
    note: str
    def __init__(self, protocol: _Optional[int] = ..., node_name: _Optional[str] = ..., address: _Optional[str] = ..., slots: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., troubles: _Optional[_Iterable[str]] = ..., units: _Optional[_Iterable[_Union[Unit, _Mapping]]] = ..., version: _Optional[str] = ..., boot_id: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class Unit(_message.Message):
    __slots__ = ("job_id", "state", "slots", "exit_code", "reason", "failures", "order")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Unit.State]
        WAITING: _ClassVar[Unit.State]
        RUNNING: _ClassVar[Unit.State]
        LEAVING: _ClassVar[Unit.State]
        ENDED: _ClassVar[Unit.State]
        REFUSED: _ClassVar[Unit.State]
    STATE_UNSPECIFIED: Unit.State
    WAITING: Unit.State
    RUNNING: Unit.State
    LEAVING: Unit.State
    ENDED: Unit.State
    REFUSED: Unit.State
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: Unit.State
    slots: _containers.RepeatedScalarFieldContainer[int]
    exit_code: int
    reason: str
    failures: int
    order: int
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[_Union[Unit.State, str]] = ..., slots: _Optional[_Iterable[int]] = ..., exit_code: _Optional[int] = ..., reason: _Optional[str] = ..., failures: _Optional[int] = ..., order: _Optional[int] = ...) -> None: ...

class Orders(_message.Message):
    __slots__ = ("orders",)
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    orders: _containers.RepeatedCompositeFieldContainer[Order]
    def __init__(self, orders: _Optional[_Iterable[_Union[Order, _Mapping]]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("job_id", "slots", "number", "nonce")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    slots: int
    number: int
    nonce: str
    def __init__(self, job_id: _Optional[str] = ..., slots: _Optional[int] = ..., number: _Optional[int] = ..., nonce: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("force", "reason")
    FORCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    force: bool
    reason: str
    def __init__(self, force: bool = ..., reason: _Optional[str] = ...) -> None: ...

class JobOutcome(_message.Message):
    __slots__ = ("outcome", "exit_code", "reason", "ended_unix_s", "nonce")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[JobOutcome.Outcome]
        SUCCEEDED: _ClassVar[JobOutcome.Outcome]
        FAILED: _ClassVar[JobOutcome.Outcome]
        STOPPED: _ClassVar[JobOutcome.Outcome]
    OUTCOME_UNSPECIFIED: JobOutcome.Outcome
    SUCCEEDED: JobOutcome.Outcome
    FAILED: JobOutcome.Outcome
    STOPPED: JobOutcome.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENDED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    outcome: JobOutcome.Outcome
    exit_code: int
    reason: str
    ended_unix_s: float
    nonce: str
    def __init__(self, outcome: _Optional[_Union[JobOutcome.Outcome, str]] = ..., exit_code: _Optional[int] = ..., reason: _Optional[str] = ..., ended_unix_s: _Optional[float] = ..., nonce: _Optional[str] = ...) -> None: ...

class Scheduler(_message.Message):
    __slots__ = ("node_name",)
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    def __init__(self, node_name: _Optional[str] = ...) -> None: ...
