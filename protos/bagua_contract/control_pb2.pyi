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
