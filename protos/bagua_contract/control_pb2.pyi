from bagua_contract import session_pb2 as _session_pb2
from bagua_contract import trace_pb2 as _trace_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProbeRequest(_message.Message):
    __slots__ = ("job_id", "agent_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    agent_id: str
    def __init__(self, job_id: _Optional[str] = ..., agent_id: _Optional[str] = ...) -> None: ...

class ProbeForRequest(_message.Message):
    __slots__ = ("request", "control_address", "timeout_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    request: ProbeRequest
    control_address: str
    timeout_s: float
    def __init__(self, request: _Optional[_Union[ProbeRequest, _Mapping]] = ..., control_address: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("verdict", "workers")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[ProbeReply.Verdict]
        ALIVE: _ClassVar[ProbeReply.Verdict]
        REFUSED: _ClassVar[ProbeReply.Verdict]
        UNANSWERED: _ClassVar[ProbeReply.Verdict]
    VERDICT_UNSPECIFIED: ProbeReply.Verdict
    ALIVE: ProbeReply.Verdict
    REFUSED: ProbeReply.Verdict
    UNANSWERED: ProbeReply.Verdict
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    verdict: ProbeReply.Verdict
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, verdict: _Optional[_Union[ProbeReply.Verdict, str]] = ..., workers: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadRecordRequest(_message.Message):
    __slots__ = ("job_id", "sha256")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    sha256: bytes
    def __init__(self, job_id: _Optional[str] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class ReadRecordReply(_message.Message):
    __slots__ = ("packed",)
    PACKED_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    def __init__(self, packed: _Optional[bytes] = ...) -> None: ...

class ReadNodeRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class ReadNodeReply(_message.Message):
    __slots__ = ("node_name", "agent_id", "leads", "generation", "workers", "store_answers", "store_outages", "dashboard")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STORE_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    STORE_OUTAGES_FIELD_NUMBER: _ClassVar[int]
    DASHBOARD_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    agent_id: str
    leads: bool
    generation: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerNow]
    store_answers: bool
    store_outages: int
    dashboard: str
    def __init__(self, node_name: _Optional[str] = ..., agent_id: _Optional[str] = ..., leads: bool = ..., generation: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerNow, _Mapping]]] = ..., store_answers: bool = ..., store_outages: _Optional[int] = ..., dashboard: _Optional[str] = ...) -> None: ...

class WorkerNow(_message.Message):
    __slots__ = ("slot", "worker_id", "pid", "global_rank", "progress", "net", "stopped")
    class NetEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SLOT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    NET_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    slot: int
    worker_id: str
    pid: int
    global_rank: int
    progress: _session_pb2.Progress
    net: _containers.ScalarMap[str, float]
    stopped: bool
    def __init__(self, slot: _Optional[int] = ..., worker_id: _Optional[str] = ..., pid: _Optional[int] = ..., global_rank: _Optional[int] = ..., progress: _Optional[_Union[_session_pb2.Progress, _Mapping]] = ..., net: _Optional[_Mapping[str, float]] = ..., stopped: bool = ...) -> None: ...

class ReadOutputRequest(_message.Message):
    __slots__ = ("job_id", "slot", "stream", "position")
    class Stream(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STREAM_UNSPECIFIED: _ClassVar[ReadOutputRequest.Stream]
        STDOUT: _ClassVar[ReadOutputRequest.Stream]
        STDERR: _ClassVar[ReadOutputRequest.Stream]
    STREAM_UNSPECIFIED: ReadOutputRequest.Stream
    STDOUT: ReadOutputRequest.Stream
    STDERR: ReadOutputRequest.Stream
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    slot: int
    stream: ReadOutputRequest.Stream
    position: int
    def __init__(self, job_id: _Optional[str] = ..., slot: _Optional[int] = ..., stream: _Optional[_Union[ReadOutputRequest.Stream, str]] = ..., position: _Optional[int] = ...) -> None: ...

class ReadOutputReply(_message.Message):
    __slots__ = ("kept", "position", "data")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    kept: bool
    position: int
    data: bytes
    def __init__(self, kept: bool = ..., position: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReadStacksRequest(_message.Message):
    __slots__ = ("job_id", "slot")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    slot: int
    def __init__(self, job_id: _Optional[str] = ..., slot: _Optional[int] = ...) -> None: ...

class ReadStacksReply(_message.Message):
    __slots__ = ("text", "problem")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    text: str
    problem: str
    def __init__(self, text: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class ReadCollectivesRequest(_message.Message):
    __slots__ = ("job_id", "slot")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    slot: int
    def __init__(self, job_id: _Optional[str] = ..., slot: _Optional[int] = ...) -> None: ...

class ReadCollectivesReply(_message.Message):
    __slots__ = ("answer", "problem")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    answer: str
    problem: str
    def __init__(self, answer: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...
