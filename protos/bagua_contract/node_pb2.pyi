from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListLogsRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class ListLogsReply(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLogs]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerLogs, _Mapping]]] = ...) -> None: ...

class WorkerLogs(_message.Message):
    __slots__ = ("directory", "stdout_bytes", "stderr_bytes")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    STDOUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STDERR_BYTES_FIELD_NUMBER: _ClassVar[int]
    directory: str
    stdout_bytes: int
    stderr_bytes: int
    def __init__(self, directory: _Optional[str] = ..., stdout_bytes: _Optional[int] = ..., stderr_bytes: _Optional[int] = ...) -> None: ...

class ReadLogRequest(_message.Message):
    __slots__ = ("job_id", "directory", "stream", "last_bytes", "follow", "from_bytes")
    class Stream(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STREAM_UNSPECIFIED: _ClassVar[ReadLogRequest.Stream]
        STDOUT: _ClassVar[ReadLogRequest.Stream]
        STDERR: _ClassVar[ReadLogRequest.Stream]
    STREAM_UNSPECIFIED: ReadLogRequest.Stream
    STDOUT: ReadLogRequest.Stream
    STDERR: ReadLogRequest.Stream
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    LAST_BYTES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    FROM_BYTES_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    directory: str
    stream: ReadLogRequest.Stream
    last_bytes: int
    follow: bool
    from_bytes: int
    def __init__(self, job_id: _Optional[str] = ..., directory: _Optional[str] = ..., stream: _Optional[_Union[ReadLogRequest.Stream, str]] = ..., last_bytes: _Optional[int] = ..., follow: bool = ..., from_bytes: _Optional[int] = ...) -> None: ...

class LogChunk(_message.Message):
    __slots__ = ("data", "position")
    DATA_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    position: int
    def __init__(self, data: _Optional[bytes] = ..., position: _Optional[int] = ...) -> None: ...
