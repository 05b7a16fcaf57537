from bagua_contract import membership_pb2 as _membership_pb2
from bagua_contract import trace_pb2 as _trace_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "ready", "entered", "progress", "suspected", "left", "training_done", "went_on", "straggler", "spans")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_DONE_FIELD_NUMBER: _ClassVar[int]
    WENT_ON_FIELD_NUMBER: _ClassVar[int]
    STRAGGLER_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    entered: Entered
    progress: Progress
    suspected: Suspected
    left: Left
    training_done: TrainingDone
    went_on: WentOn
    straggler: Straggler
    spans: _trace_pb2.Spans
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., entered: _Optional[_Union[Entered, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., suspected: _Optional[_Union[Suspected, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ..., training_done: _Optional[_Union[TrainingDone, _Mapping]] = ..., went_on: _Optional[_Union[WentOn, _Mapping]] = ..., straggler: _Optional[_Union[Straggler, _Mapping]] = ..., spans: _Optional[_Union[_trace_pb2.Spans, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "worker_id", "pid")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker_id: str
    pid: int
    def __init__(self, protocol: _Optional[int] = ..., worker_id: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("store_address", "fingerprint", "committed_generation", "stage", "gathering")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    GATHERING_FIELD_NUMBER: _ClassVar[int]
    store_address: str
    fingerprint: _containers.ScalarMap[str, str]
    committed_generation: int
    stage: _membership_pb2.Stage
    gathering: int
    def __init__(self, store_address: _Optional[str] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., committed_generation: _Optional[int] = ..., stage: _Optional[_Union[_membership_pb2.Stage, str]] = ..., gathering: _Optional[int] = ...) -> None: ...

class Entered(_message.Message):
    __slots__ = ("generation", "step", "lost_s")
    class LostSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOST_S_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    lost_s: _containers.ScalarMap[str, float]
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., lost_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("generation", "step", "epoch", "steps_per_s", "metrics", "spent_s", "step_counts", "step_sum_s", "computing_s", "total_steps", "step_samples", "sent_bytes", "copied_bytes", "gradient_bytes", "algorithm", "order", "bucket_times", "checkpoint_trouble", "checkpoint_step", "copied_s", "interface", "samples", "job_loss", "job_losses", "warms_up", "joining", "shard_share")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SpentSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SPENT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    STEP_SUM_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_TIMES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    COPIED_S_FIELD_NUMBER: _ClassVar[int]
    INTERFACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    JOB_LOSS_FIELD_NUMBER: _ClassVar[int]
    JOB_LOSSES_FIELD_NUMBER: _ClassVar[int]
    WARMS_UP_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    SHARD_SHARE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    epoch: int
    steps_per_s: float
    metrics: _containers.ScalarMap[str, float]
    spent_s: _containers.ScalarMap[str, float]
    step_counts: _containers.RepeatedScalarFieldContainer[int]
    step_sum_s: float
    computing_s: float
    total_steps: int
    step_samples: int
    sent_bytes: int
    copied_bytes: int
    gradient_bytes: int
    algorithm: str
    order: _containers.RepeatedScalarFieldContainer[int]
    bucket_times: _containers.RepeatedCompositeFieldContainer[BucketTime]
    checkpoint_trouble: str
    checkpoint_step: int
    copied_s: float
    interface: str
    samples: int
    job_loss: float
    job_losses: int
    warms_up: bool
    joining: bool
    shard_share: float
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., steps_per_s: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., spent_s: _Optional[_Mapping[str, float]] = ..., step_counts: _Optional[_Iterable[int]] = ..., step_sum_s: _Optional[float] = ..., computing_s: _Optional[float] = ..., total_steps: _Optional[int] = ..., step_samples: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., gradient_bytes: _Optional[int] = ..., algorithm: _Optional[str] = ..., order: _Optional[_Iterable[int]] = ..., bucket_times: _Optional[_Iterable[_Union[BucketTime, _Mapping]]] = ..., checkpoint_trouble: _Optional[str] = ..., checkpoint_step: _Optional[int] = ..., copied_s: _Optional[float] = ..., interface: _Optional[str] = ..., samples: _Optional[int] = ..., job_loss: _Optional[float] = ..., job_losses: _Optional[int] = ..., warms_up: bool = ..., joining: bool = ..., shard_share: _Optional[float] = ...) -> None: ...

class BucketTime(_message.Message):
    __slots__ = ("bytes", "seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Suspected(_message.Message):
    __slots__ = ("generation", "kind", "hosts", "detail", "waited_s", "usual_step_s", "waits_in")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    USUAL_STEP_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_IN_FIELD_NUMBER: _ClassVar[int]
    generation: int
    kind: _membership_pb2.Suspicion.Kind
    hosts: _containers.RepeatedScalarFieldContainer[str]
    detail: str
    waited_s: float
    usual_step_s: float
    waits_in: _membership_pb2.CollectiveWait
    def __init__(self, generation: _Optional[int] = ..., kind: _Optional[_Union[_membership_pb2.Suspicion.Kind, str]] = ..., hosts: _Optional[_Iterable[str]] = ..., detail: _Optional[str] = ..., waited_s: _Optional[float] = ..., usual_step_s: _Optional[float] = ..., waits_in: _Optional[_Union[_membership_pb2.CollectiveWait, _Mapping]] = ...) -> None: ...

class WentOn(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Straggler(_message.Message):
    __slots__ = ("generation", "step", "global_rank", "computing_s", "others_s", "recovered")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_S_FIELD_NUMBER: _ClassVar[int]
    OTHERS_S_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    global_rank: int
    computing_s: float
    others_s: float
    recovered: bool
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., global_rank: _Optional[int] = ..., computing_s: _Optional[float] = ..., others_s: _Optional[float] = ..., recovered: bool = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ("generation", "last")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    generation: int
    last: _membership_pb2.LastCheckpoint
    def __init__(self, generation: _Optional[int] = ..., last: _Optional[_Union[_membership_pb2.LastCheckpoint, _Mapping]] = ...) -> None: ...

class TrainingDone(_message.Message):
    __slots__ = ("generation", "step")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class AgentMessage(_message.Message):
    __slots__ = ("welcome", "new_generation", "leave", "close", "refused", "disagreement", "replica", "trace")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    NEW_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DISAGREEMENT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    new_generation: NewGeneration
    leave: Leave
    close: Close
    refused: _membership_pb2.Refusal
    disagreement: Disagreement
    replica: _membership_pb2.Replica
    trace: _trace_pb2.TraceOrder
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., new_generation: _Optional[_Union[NewGeneration, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., refused: _Optional[_Union[_membership_pb2.Refusal, _Mapping]] = ..., disagreement: _Optional[_Union[Disagreement, _Mapping]] = ..., replica: _Optional[_Union[_membership_pb2.Replica, _Mapping]] = ..., trace: _Optional[_Union[_trace_pb2.TraceOrder, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "nonce")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    nonce: str
    def __init__(self, protocol: _Optional[int] = ..., nonce: _Optional[str] = ...) -> None: ...

class NewGeneration(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: _membership_pb2.Generation
    def __init__(self, generation: _Optional[_Union[_membership_pb2.Generation, _Mapping]] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("within_s", "interrupt")
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    INTERRUPT_FIELD_NUMBER: _ClassVar[int]
    within_s: float
    interrupt: bool
    def __init__(self, within_s: _Optional[float] = ..., interrupt: bool = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Disagreement(_message.Message):
    __slots__ = ("difference",)
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    difference: str
    def __init__(self, difference: _Optional[str] = ...) -> None: ...
