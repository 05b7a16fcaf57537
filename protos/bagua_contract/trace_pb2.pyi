from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TraceOrder(_message.Message):
    __slots__ = ("number", "steps", "most_spans")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MOST_SPANS_FIELD_NUMBER: _ClassVar[int]
    number: int
    steps: int
    most_spans: int
    def __init__(self, number: _Optional[int] = ..., steps: _Optional[int] = ..., most_spans: _Optional[int] = ...) -> None: ...

class Spans(_message.Message):
    __slots__ = ("number", "new_names", "new_tracks", "names", "tracks", "begins_ns", "durations_ns", "values", "left_out", "done", "positions", "base_ns")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NEW_NAMES_FIELD_NUMBER: _ClassVar[int]
    NEW_TRACKS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TRACKS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_NS_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_NS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    BASE_NS_FIELD_NUMBER: _ClassVar[int]
    number: int
    new_names: _containers.RepeatedScalarFieldContainer[str]
    new_tracks: _containers.RepeatedScalarFieldContainer[str]
    names: _containers.RepeatedScalarFieldContainer[int]
    tracks: _containers.RepeatedScalarFieldContainer[int]
    begins_ns: _containers.RepeatedScalarFieldContainer[int]
    durations_ns: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    left_out: int
    done: bool
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    base_ns: int
    def __init__(self, number: _Optional[int] = ..., new_names: _Optional[_Iterable[str]] = ..., new_tracks: _Optional[_Iterable[str]] = ..., names: _Optional[_Iterable[int]] = ..., tracks: _Optional[_Iterable[int]] = ..., begins_ns: _Optional[_Iterable[int]] = ..., durations_ns: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[int]] = ..., left_out: _Optional[int] = ..., done: bool = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., base_ns: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("at_ns", "generation", "global_rank", "world_size", "kind", "reason", "step")
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    at_ns: int
    generation: int
    global_rank: int
    world_size: int
    kind: str
    reason: str
    step: int
    def __init__(self, at_ns: _Optional[int] = ..., generation: _Optional[int] = ..., global_rank: _Optional[int] = ..., world_size: _Optional[int] = ..., kind: _Optional[str] = ..., reason: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("job_id", "agent_id", "steps", "within_s", "asker", "most_spans")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    ASKER_FIELD_NUMBER: _ClassVar[int]
    MOST_SPANS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    agent_id: str
    steps: int
    within_s: float
    asker: str
    most_spans: int
    def __init__(self, job_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., steps: _Optional[int] = ..., within_s: _Optional[float] = ..., asker: _Optional[str] = ..., most_spans: _Optional[int] = ...) -> None: ...

class TraceReply(_message.Message):
    __slots__ = ("begun", "spans", "appeared", "ended", "left_out")
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    APPEARED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    begun: TraceBegun
    spans: WorkerSpans
    appeared: WorkerEvent
    ended: WorkerEvent
    left_out: int
    def __init__(self, begun: _Optional[_Union[TraceBegun, _Mapping]] = ..., spans: _Optional[_Union[WorkerSpans, _Mapping]] = ..., appeared: _Optional[_Union[WorkerEvent, _Mapping]] = ..., ended: _Optional[_Union[WorkerEvent, _Mapping]] = ..., left_out: _Optional[int] = ...) -> None: ...

class TraceBegun(_message.Message):
    __slots__ = ("node_name", "restart_mode", "workers")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    RESTART_MODE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    restart_mode: bool
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_name: _Optional[str] = ..., restart_mode: bool = ..., workers: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerSpans(_message.Message):
    __slots__ = ("worker_id", "spans")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    spans: Spans
    def __init__(self, worker_id: _Optional[str] = ..., spans: _Optional[_Union[Spans, _Mapping]] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class ClockRequest(_message.Message):
    __slots__ = ("job_id", "agent_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    agent_id: str
    def __init__(self, job_id: _Optional[str] = ..., agent_id: _Optional[str] = ...) -> None: ...

class ClockReply(_message.Message):
    __slots__ = ("monotonic_ns",)
    MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    monotonic_ns: int
    def __init__(self, monotonic_ns: _Optional[int] = ...) -> None: ...
