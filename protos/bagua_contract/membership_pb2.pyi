from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOOP: _ClassVar[Stage]
    WAITING: _ClassVar[Stage]
    PREPARING: _ClassVar[Stage]
    ASSEMBLING: _ClassVar[Stage]
LOOP: Stage
WAITING: Stage
PREPARING: Stage
ASSEMBLING: Stage

class StateName(_message.Message):
    __slots__ = ("generation", "step", "operations")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    operations: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., operations: _Optional[int] = ...) -> None: ...

class JobSpec(_message.Message):
    __slots__ = ("protocol", "nonce", "max_restarts", "script", "mode", "size_policy", "autotune", "replica_size")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[JobSpec.Mode]
        LIVE: _ClassVar[JobSpec.Mode]
        RESTART: _ClassVar[JobSpec.Mode]
    MODE_UNSPECIFIED: JobSpec.Mode
    LIVE: JobSpec.Mode
    RESTART: JobSpec.Mode
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MAX_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SIZE_POLICY_FIELD_NUMBER: _ClassVar[int]
    AUTOTUNE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    nonce: str
    max_restarts: int
    script: str
    mode: JobSpec.Mode
    size_policy: SizePolicy
    autotune: Autotune
    replica_size: int
    def __init__(self, protocol: _Optional[int] = ..., nonce: _Optional[str] = ..., max_restarts: _Optional[int] = ..., script: _Optional[str] = ..., mode: _Optional[_Union[JobSpec.Mode, str]] = ..., size_policy: _Optional[_Union[SizePolicy, _Mapping]] = ..., autotune: _Optional[_Union[Autotune, _Mapping]] = ..., replica_size: _Optional[int] = ...) -> None: ...

class SizePolicy(_message.Message):
    __slots__ = ("sizes", "start_size", "cooldown_s")
    SIZES_FIELD_NUMBER: _ClassVar[int]
    START_SIZE_FIELD_NUMBER: _ClassVar[int]
    COOLDOWN_S_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    start_size: int
    cooldown_s: float
    def __init__(self, sizes: _Optional[_Iterable[int]] = ..., start_size: _Optional[int] = ..., cooldown_s: _Optional[float] = ...) -> None: ...

class Desired(_message.Message):
    __slots__ = ("min_nodes", "max_nodes")
    MIN_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    min_nodes: int
    max_nodes: int
    def __init__(self, min_nodes: _Optional[int] = ..., max_nodes: _Optional[int] = ...) -> None: ...

class StepSettings(_message.Message):
    __slots__ = ("bucket_bytes", "hierarchical", "algorithm", "order")
    class Switch(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SCRIPT: _ClassVar[StepSettings.Switch]
        ON: _ClassVar[StepSettings.Switch]
        OFF: _ClassVar[StepSettings.Switch]
    SCRIPT: StepSettings.Switch
    ON: StepSettings.Switch
    OFF: StepSettings.Switch
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIERARCHICAL_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    bucket_bytes: int
    hierarchical: StepSettings.Switch
    algorithm: str
    order: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bucket_bytes: _Optional[int] = ..., hierarchical: _Optional[_Union[StepSettings.Switch, str]] = ..., algorithm: _Optional[str] = ..., order: _Optional[_Iterable[int]] = ...) -> None: ...

class PinnedSettings(_message.Message):
    __slots__ = ("settings", "forgets")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    FORGETS_FIELD_NUMBER: _ClassVar[int]
    settings: StepSettings
    forgets: int
    def __init__(self, settings: _Optional[_Union[StepSettings, _Mapping]] = ..., forgets: _Optional[int] = ...) -> None: ...

class Autotune(_message.Message):
    __slots__ = ("level", "max_samples", "confidence_s", "warmup_s", "algorithms")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_S_FIELD_NUMBER: _ClassVar[int]
    WARMUP_S_FIELD_NUMBER: _ClassVar[int]
    ALGORITHMS_FIELD_NUMBER: _ClassVar[int]
    level: int
    max_samples: int
    confidence_s: float
    warmup_s: float
    algorithms: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, level: _Optional[int] = ..., max_samples: _Optional[int] = ..., confidence_s: _Optional[float] = ..., warmup_s: _Optional[float] = ..., algorithms: _Optional[_Iterable[str]] = ...) -> None: ...

class MeasuredSteps(_message.Message):
    __slots__ = ("generation", "steps", "seconds", "switch_s", "gradient_bytes", "order", "computing_s", "bucket_bytes", "bucket_s", "warms_up", "before_steps", "before_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SWITCH_S_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_S_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUCKET_S_FIELD_NUMBER: _ClassVar[int]
    WARMS_UP_FIELD_NUMBER: _ClassVar[int]
    BEFORE_STEPS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    generation: int
    steps: int
    seconds: float
    switch_s: float
    gradient_bytes: int
    order: _containers.RepeatedScalarFieldContainer[int]
    computing_s: float
    bucket_bytes: _containers.RepeatedScalarFieldContainer[int]
    bucket_s: _containers.RepeatedScalarFieldContainer[float]
    warms_up: bool
    before_steps: int
    before_s: float
    def __init__(self, generation: _Optional[int] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ..., switch_s: _Optional[float] = ..., gradient_bytes: _Optional[int] = ..., order: _Optional[_Iterable[int]] = ..., computing_s: _Optional[float] = ..., bucket_bytes: _Optional[_Iterable[int]] = ..., bucket_s: _Optional[_Iterable[float]] = ..., warms_up: bool = ..., before_steps: _Optional[int] = ..., before_s: _Optional[float] = ...) -> None: ...

class Study(_message.Message):
    __slots__ = ("current", "number", "world", "phase", "trials", "trained_s", "lost_s", "generation", "steps", "seconds", "window_steps", "window_s", "drifts", "known", "forgets", "proposal", "before_steps", "before_s", "change_s", "unspent_s")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WARMING: _ClassVar[Study.Phase]
        TRYING: _ClassVar[Study.Phase]
        RESTING: _ClassVar[Study.Phase]
        SETTLED: _ClassVar[Study.Phase]
    WARMING: Study.Phase
    TRYING: Study.Phase
    RESTING: Study.Phase
    SETTLED: Study.Phase
    class KnownEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: StepSettings
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[StepSettings, _Mapping]] = ...) -> None: ...
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TRIALS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_S_FIELD_NUMBER: _ClassVar[int]
    LOST_S_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_STEPS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    DRIFTS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    FORGETS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    BEFORE_STEPS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    CHANGE_S_FIELD_NUMBER: _ClassVar[int]
    UNSPENT_S_FIELD_NUMBER: _ClassVar[int]
    current: StepSettings
    number: int
    world: str
    phase: Study.Phase
    trials: _containers.RepeatedCompositeFieldContainer[Trial]
    trained_s: float
    lost_s: float
    generation: int
    steps: int
    seconds: float
    window_steps: int
    window_s: float
    drifts: _containers.RepeatedScalarFieldContainer[float]
    known: _containers.MessageMap[str, StepSettings]
    forgets: int
    proposal: Proposal
    before_steps: int
    before_s: float
    change_s: float
    unspent_s: float
    def __init__(self, current: _Optional[_Union[StepSettings, _Mapping]] = ..., number: _Optional[int] = ..., world: _Optional[str] = ..., phase: _Optional[_Union[Study.Phase, str]] = ..., trials: _Optional[_Iterable[_Union[Trial, _Mapping]]] = ..., trained_s: _Optional[float] = ..., lost_s: _Optional[float] = ..., generation: _Optional[int] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ..., window_steps: _Optional[int] = ..., window_s: _Optional[float] = ..., drifts: _Optional[_Iterable[float]] = ..., known: _Optional[_Mapping[str, StepSettings]] = ..., forgets: _Optional[int] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., before_steps: _Optional[int] = ..., before_s: _Optional[float] = ..., change_s: _Optional[float] = ..., unspent_s: _Optional[float] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("algorithm", "predicted_s", "instead_of", "instead_of_s", "instead_of_predicted_s", "compute_s", "bytes_per_s", "latency_s", "measured_s")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_OF_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_OF_S_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_OF_PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_S_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    predicted_s: float
    instead_of: str
    instead_of_s: float
    instead_of_predicted_s: float
    compute_s: float
    bytes_per_s: float
    latency_s: float
    measured_s: float
    def __init__(self, algorithm: _Optional[str] = ..., predicted_s: _Optional[float] = ..., instead_of: _Optional[str] = ..., instead_of_s: _Optional[float] = ..., instead_of_predicted_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ..., measured_s: _Optional[float] = ...) -> None: ...

class Trial(_message.Message):
    __slots__ = ("settings", "steps", "seconds", "ended_s")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    settings: StepSettings
    steps: int
    seconds: float
    ended_s: float
    def __init__(self, settings: _Optional[_Union[StepSettings, _Mapping]] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ..., ended_s: _Optional[float] = ...) -> None: ...

class Tuned(_message.Message):
    __slots__ = ("settings", "steps_per_s", "scripted_steps_per_s", "model", "world", "network", "job_id", "found_unix_s")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SCRIPTED_STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FOUND_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    settings: StepSettings
    steps_per_s: float
    scripted_steps_per_s: float
    model: str
    world: str
    network: str
    job_id: str
    found_unix_s: float
    def __init__(self, settings: _Optional[_Union[StepSettings, _Mapping]] = ..., steps_per_s: _Optional[float] = ..., scripted_steps_per_s: _Optional[float] = ..., model: _Optional[str] = ..., world: _Optional[str] = ..., network: _Optional[str] = ..., job_id: _Optional[str] = ..., found_unix_s: _Optional[float] = ...) -> None: ...

class Leader(_message.Message):
    __slots__ = ("agent_id", "control_address")
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    agent_id: str
    control_address: str
    def __init__(self, agent_id: _Optional[str] = ..., control_address: _Optional[str] = ...) -> None: ...

class Agent(_message.Message):
    __slots__ = ("protocol", "agent_id", "node_name", "control_address", "slots", "topology", "leaving", "ready", "run_generation", "run", "cut_off")
    class Run(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[Agent.Run]
        RUNNING: _ClassVar[Agent.Run]
        ENDING: _ClassVar[Agent.Run]
        FINISHED: _ClassVar[Agent.Run]
        FAILED: _ClassVar[Agent.Run]
    NONE: Agent.Run
    RUNNING: Agent.Run
    ENDING: Agent.Run
    FINISHED: Agent.Run
    FAILED: Agent.Run
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RUN_GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    agent_id: str
    node_name: str
    control_address: str
    slots: int
    topology: str
    leaving: bool
    ready: bool
    run_generation: int
    run: Agent.Run
    cut_off: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., agent_id: _Optional[str] = ..., node_name: _Optional[str] = ..., control_address: _Optional[str] = ..., slots: _Optional[int] = ..., topology: _Optional[str] = ..., leaving: bool = ..., ready: bool = ..., run_generation: _Optional[int] = ..., run: _Optional[_Union[Agent.Run, str]] = ..., cut_off: _Optional[_Iterable[str]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("protocol", "nonce", "replica_id", "members", "over")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    nonce: str
    replica_id: str
    members: _containers.RepeatedCompositeFieldContainer[ReplicaMember]
    over: str
    def __init__(self, protocol: _Optional[int] = ..., nonce: _Optional[str] = ..., replica_id: _Optional[str] = ..., members: _Optional[_Iterable[_Union[ReplicaMember, _Mapping]]] = ..., over: _Optional[str] = ...) -> None: ...

class ReplicaMember(_message.Message):
    __slots__ = ("worker_id", "agent_id", "node_name", "slot", "store_address", "control_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    agent_id: str
    node_name: str
    slot: int
    store_address: str
    control_address: str
    def __init__(self, worker_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., node_name: _Optional[str] = ..., slot: _Optional[int] = ..., store_address: _Optional[str] = ..., control_address: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("protocol", "worker_id", "agent_id", "slot", "store_address", "fingerprint", "committed_generation", "nonce", "stage")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker_id: str
    agent_id: str
    slot: int
    store_address: str
    fingerprint: _containers.ScalarMap[str, str]
    committed_generation: int
    nonce: str
    stage: Stage
    def __init__(self, protocol: _Optional[int] = ..., worker_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., slot: _Optional[int] = ..., store_address: _Optional[str] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., committed_generation: _Optional[int] = ..., nonce: _Optional[str] = ..., stage: _Optional[_Union[Stage, str]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("worker_id", "agent_id", "node_name", "slot", "global_rank", "node_rank", "local_rank", "store_address", "since_generation", "join_revision", "holder", "replica_rank", "shard_rank")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SINCE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    JOIN_REVISION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    SHARD_RANK_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    agent_id: str
    node_name: str
    slot: int
    global_rank: int
    node_rank: int
    local_rank: int
    store_address: str
    since_generation: int
    join_revision: int
    holder: bool
    replica_rank: int
    shard_rank: int
    def __init__(self, worker_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., node_name: _Optional[str] = ..., slot: _Optional[int] = ..., global_rank: _Optional[int] = ..., node_rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., store_address: _Optional[str] = ..., since_generation: _Optional[int] = ..., join_revision: _Optional[int] = ..., holder: bool = ..., replica_rank: _Optional[int] = ..., shard_rank: _Optional[int] = ...) -> None: ...

class RecordParts(_message.Message):
    __slots__ = ("folder", "count", "sha256", "node_count", "keepers")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NODE_COUNT_FIELD_NUMBER: _ClassVar[int]
    KEEPERS_FIELD_NUMBER: _ClassVar[int]
    folder: str
    count: int
    sha256: bytes
    node_count: int
    keepers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, folder: _Optional[str] = ..., count: _Optional[int] = ..., sha256: _Optional[bytes] = ..., node_count: _Optional[int] = ..., keepers: _Optional[_Iterable[str]] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("protocol", "nonce", "number", "base", "kind", "members", "reason", "fingerprint", "script_failures", "parts", "again", "answers_at", "settings", "restarts")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Generation.Kind]
        PLANNED: _ClassVar[Generation.Kind]
        FAILOVER: _ClassVar[Generation.Kind]
        RESTART: _ClassVar[Generation.Kind]
        GATHERING: _ClassVar[Generation.Kind]
    KIND_UNSPECIFIED: Generation.Kind
    PLANNED: Generation.Kind
    FAILOVER: Generation.Kind
    RESTART: Generation.Kind
    GATHERING: Generation.Kind
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_AT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    nonce: str
    number: int
    base: int
    kind: Generation.Kind
    members: _containers.RepeatedCompositeFieldContainer[Placement]
    reason: str
    fingerprint: _containers.ScalarMap[str, str]
    script_failures: int
    parts: RecordParts
    again: bool
    answers_at: _containers.RepeatedScalarFieldContainer[str]
    settings: StepSettings
    restarts: int
    def __init__(self, protocol: _Optional[int] = ..., nonce: _Optional[str] = ..., number: _Optional[int] = ..., base: _Optional[int] = ..., kind: _Optional[_Union[Generation.Kind, str]] = ..., members: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., reason: _Optional[str] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., script_failures: _Optional[int] = ..., parts: _Optional[_Union[RecordParts, _Mapping]] = ..., again: bool = ..., answers_at: _Optional[_Iterable[str]] = ..., settings: _Optional[_Union[StepSettings, _Mapping]] = ..., restarts: _Optional[int] = ...) -> None: ...

class Meeting(_message.Message):
    __slots__ = ("generation", "address")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    address: str
    def __init__(self, generation: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Suspicion(_message.Message):
    __slots__ = ("worker_id", "generation", "kind", "hosts", "detail", "sequence", "waited_s", "usual_step_s", "waits_in")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Suspicion.Kind]
        BROKEN: _ClassVar[Suspicion.Kind]
        STALLED: _ClassVar[Suspicion.Kind]
        UNBUILT: _ClassVar[Suspicion.Kind]
    KIND_UNSPECIFIED: Suspicion.Kind
    BROKEN: Suspicion.Kind
    STALLED: Suspicion.Kind
    UNBUILT: Suspicion.Kind
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    USUAL_STEP_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_IN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    kind: Suspicion.Kind
    hosts: _containers.RepeatedScalarFieldContainer[str]
    detail: str
    sequence: int
    waited_s: float
    usual_step_s: float
    waits_in: CollectiveWait
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., kind: _Optional[_Union[Suspicion.Kind, str]] = ..., hosts: _Optional[_Iterable[str]] = ..., detail: _Optional[str] = ..., sequence: _Optional[int] = ..., waited_s: _Optional[float] = ..., usual_step_s: _Optional[float] = ..., waits_in: _Optional[_Union[CollectiveWait, _Mapping]] = ...) -> None: ...

class CollectiveWait(_message.Message):
    __slots__ = ("call_site", "operations")
    CALL_SITE_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    call_site: str
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    def __init__(self, call_site: _Optional[str] = ..., operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("step", "place", "name")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    step: int
    place: int
    name: str
    def __init__(self, step: _Optional[int] = ..., place: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class HangOrder(_message.Message):
    __slots__ = ("generation", "outcome", "workers", "reason")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[HangOrder.Outcome]
        NAME: _ClassVar[HangOrder.Outcome]
        RENEW: _ClassVar[HangOrder.Outcome]
        REPLACE: _ClassVar[HangOrder.Outcome]
        GIVE_UP: _ClassVar[HangOrder.Outcome]
        DISAGREE: _ClassVar[HangOrder.Outcome]
    OUTCOME_UNSPECIFIED: HangOrder.Outcome
    NAME: HangOrder.Outcome
    RENEW: HangOrder.Outcome
    REPLACE: HangOrder.Outcome
    GIVE_UP: HangOrder.Outcome
    DISAGREE: HangOrder.Outcome
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    outcome: HangOrder.Outcome
    workers: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, generation: _Optional[int] = ..., outcome: _Optional[_Union[HangOrder.Outcome, str]] = ..., workers: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("worker_id", "agent_id", "node_name", "slot", "global_rank", "exit_code", "cause", "log_path", "step", "in_step", "script_failure", "traceback_tail", "generation", "kills_in_a_row", "joining")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    LOG_PATH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IN_STEP_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FAILURE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_TAIL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KILLS_IN_A_ROW_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    agent_id: str
    node_name: str
    slot: int
    global_rank: int
    exit_code: int
    cause: str
    log_path: str
    step: int
    in_step: bool
    script_failure: bool
    traceback_tail: str
    generation: int
    kills_in_a_row: int
    joining: bool
    def __init__(self, worker_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., node_name: _Optional[str] = ..., slot: _Optional[int] = ..., global_rank: _Optional[int] = ..., exit_code: _Optional[int] = ..., cause: _Optional[str] = ..., log_path: _Optional[str] = ..., step: _Optional[int] = ..., in_step: bool = ..., script_failure: bool = ..., traceback_tail: _Optional[str] = ..., generation: _Optional[int] = ..., kills_in_a_row: _Optional[int] = ..., joining: bool = ...) -> None: ...

class LastCheckpoint(_message.Message):
    __slots__ = ("state", "part", "parts", "written", "problem", "replica")
    STATE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    state: StateName
    part: int
    parts: int
    written: bool
    problem: str
    replica: str
    def __init__(self, state: _Optional[_Union[StateName, _Mapping]] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., written: bool = ..., problem: _Optional[str] = ..., replica: _Optional[str] = ...) -> None: ...

class Departure(_message.Message):
    __slots__ = ("worker_id", "agent_id", "node_name", "generation", "world_size", "last")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    agent_id: str
    node_name: str
    generation: int
    world_size: int
    last: LastCheckpoint
    def __init__(self, worker_id: _Optional[str] = ..., agent_id: _Optional[str] = ..., node_name: _Optional[str] = ..., generation: _Optional[int] = ..., world_size: _Optional[int] = ..., last: _Optional[_Union[LastCheckpoint, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("worker_id", "step", "before_joining", "agent_id", "node_name", "generation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEFORE_JOINING_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    step: int
    before_joining: bool
    agent_id: str
    node_name: str
    generation: int
    def __init__(self, worker_id: _Optional[str] = ..., step: _Optional[int] = ..., before_joining: bool = ..., agent_id: _Optional[str] = ..., node_name: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Closing(_message.Message):
    __slots__ = ("worker_id", "generation", "step")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    step: int
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("outcome", "exit_code", "reason", "failure", "casualties")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[Result.Outcome]
        SUCCEEDED: _ClassVar[Result.Outcome]
        FAILED: _ClassVar[Result.Outcome]
        STOPPED: _ClassVar[Result.Outcome]
    OUTCOME_UNSPECIFIED: Result.Outcome
    SUCCEEDED: Result.Outcome
    FAILED: Result.Outcome
    STOPPED: Result.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CASUALTIES_FIELD_NUMBER: _ClassVar[int]
    outcome: Result.Outcome
    exit_code: int
    reason: str
    failure: Failure
    casualties: str
    def __init__(self, outcome: _Optional[_Union[Result.Outcome, str]] = ..., exit_code: _Optional[int] = ..., reason: _Optional[str] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., casualties: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("worker_id", "difference")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    difference: str
    def __init__(self, worker_id: _Optional[str] = ..., difference: _Optional[str] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("kind", "time_unix_s", "node_name", "text", "generation", "generation_kind", "world_size", "worker_id", "lost_s", "members")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Event.Kind]
        JOB_CREATED: _ClassVar[Event.Kind]
        GENERATION_FORMED: _ClassVar[Event.Kind]
        WORKER_LOST: _ClassVar[Event.Kind]
        WORKER_FAILED: _ClassVar[Event.Kind]
        SCALED: _ClassVar[Event.Kind]
        NODE_JOINED: _ClassVar[Event.Kind]
        NODE_LEAVING: _ClassVar[Event.Kind]
        NODE_LOST: _ClassVar[Event.Kind]
        STORE_AWAY: _ClassVar[Event.Kind]
        STORE_BACK: _ClassVar[Event.Kind]
        KEYS_LOST: _ClassVar[Event.Kind]
        JOB_ENDED: _ClassVar[Event.Kind]
        AGENT_FAILED: _ClassVar[Event.Kind]
        REPLICA_ASSEMBLED: _ClassVar[Event.Kind]
        REPLICA_OVER: _ClassVar[Event.Kind]
        TUNED: _ClassVar[Event.Kind]
        GENERATION_IN_FORCE: _ClassVar[Event.Kind]
    KIND_UNSPECIFIED: Event.Kind
    JOB_CREATED: Event.Kind
    GENERATION_FORMED: Event.Kind
    WORKER_LOST: Event.Kind
    WORKER_FAILED: Event.Kind
    SCALED: Event.Kind
    NODE_JOINED: Event.Kind
    NODE_LEAVING: Event.Kind
    NODE_LOST: Event.Kind
    STORE_AWAY: Event.Kind
    STORE_BACK: Event.Kind
    KEYS_LOST: Event.Kind
    JOB_ENDED: Event.Kind
    AGENT_FAILED: Event.Kind
    REPLICA_ASSEMBLED: Event.Kind
    REPLICA_OVER: Event.Kind
    TUNED: Event.Kind
    GENERATION_IN_FORCE: Event.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIME_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_KIND_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LOST_S_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    kind: Event.Kind
    time_unix_s: float
    node_name: str
    text: str
    generation: int
    generation_kind: Generation.Kind
    world_size: int
    worker_id: str
    lost_s: float
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[_Union[Event.Kind, str]] = ..., time_unix_s: _Optional[float] = ..., node_name: _Optional[str] = ..., text: _Optional[str] = ..., generation: _Optional[int] = ..., generation_kind: _Optional[_Union[Generation.Kind, str]] = ..., world_size: _Optional[int] = ..., worker_id: _Optional[str] = ..., lost_s: _Optional[float] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...
