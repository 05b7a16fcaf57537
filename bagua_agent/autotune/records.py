"""Reads and writes the records of tuning: the options in the job's spec, measurements, and the study. Pure."""

from __future__ import annotations

from bagua_agent.autotune.proposal import Proposal
from bagua_agent.autotune.study_records import Measured, Options, Phase, Study, Trial
from bagua_contract import membership_pb2 as pb
from bagua_contract.step_settings import SWITCHABLE, StepSettings


def options_of(spec: pb.JobSpec) -> Options:
    """Returns the job's options; off if there are none. Algorithms that this version does not know are left out."""
    if not spec.HasField("autotune"):
        return Options()
    asked = spec.autotune
    return Options(
        level=asked.level,
        max_samples=asked.max_samples,
        confidence_s=asked.confidence_s,
        warmup_s=asked.warmup_s,
        algorithms=tuple(name for name in asked.algorithms if name in SWITCHABLE),
    )


def encode_measured(measured: Measured) -> bytes:
    return pb.MeasuredSteps(
        generation=measured.generation,
        steps=measured.steps,
        seconds=measured.seconds,
        switch_s=measured.switch_s,
        gradient_bytes=measured.gradient_bytes,
        order=measured.order,
        computing_s=measured.computing_s,
        bucket_bytes=[size for size, _ in measured.buckets],
        bucket_s=[took for _, took in measured.buckets],
        warms_up=measured.warms_up,
        before_steps=measured.before_steps,
        before_s=measured.before_s,
    ).SerializeToString()


def decode_measured(value: bytes) -> Measured:
    """Reads a measurement. Raises ValueError, DecodeError for what no agent of this version writes."""
    m = pb.MeasuredSteps.FromString(value)
    for seconds in (m.seconds, m.switch_s, m.computing_s, m.before_s, *m.bucket_s):
        if not 0 <= seconds < 1e9:  # not a number fails too
            raise ValueError(f"its duration {seconds} s is not from 0 to 1e9 s")
    order = StepSettings(order=tuple(m.order)).order
    if len(m.bucket_bytes) != len(m.bucket_s):
        raise ValueError(f"it has {len(m.bucket_bytes)} buckets and {len(m.bucket_s)} times")
    buckets = tuple(zip(m.bucket_bytes, m.bucket_s, strict=True))
    return Measured(
        m.generation,
        m.steps,
        m.seconds,
        m.switch_s,
        m.gradient_bytes,
        order,
        m.computing_s,
        buckets,
        m.warms_up,
        m.before_steps,
        m.before_s,
    )


def encode_study(study: Study) -> bytes:
    return pb.Study(
        current=study.current.to_proto(),
        number=study.number,
        world=study.world,
        phase=study.phase.value,
        trials=[
            pb.Trial(settings=t.settings.to_proto(), steps=t.steps, seconds=t.seconds, ended_s=t.ended_s)
            for t in study.trials
        ],
        trained_s=study.trained_s,
        lost_s=study.lost_s,
        unspent_s=study.unspent_s,
        generation=study.generation,
        steps=study.steps,
        seconds=study.seconds,
        before_steps=study.before_steps,
        before_s=study.before_s,
        change_s=study.change_s,
        window_steps=study.window_steps,
        window_s=study.window_s,
        drifts=study.drifts,
        known={world: settings.to_proto() for world, settings in study.known.items()},
        forgets=study.forgets,
        proposal=None if study.proposal is None else study.proposal.to_proto(),
    ).SerializeToString(deterministic=True)


def decode_study(value: bytes) -> Study:
    """Reads a study. Raises ValueError, DecodeError."""
    s = pb.Study.FromString(value)
    return Study(
        number=s.number,
        world=s.world,
        phase=Phase(s.phase),
        current=StepSettings.from_proto(s.current),
        trials=tuple(
            Trial(StepSettings.from_proto(t.settings), t.steps, t.seconds, t.ended_s) for t in s.trials
        ),
        trained_s=s.trained_s,
        lost_s=s.lost_s,
        unspent_s=s.unspent_s,
        generation=s.generation,
        steps=s.steps,
        seconds=s.seconds,
        before_steps=s.before_steps,
        before_s=s.before_s if s.HasField("before_s") else None,
        change_s=s.change_s,
        window_steps=s.window_steps,
        window_s=s.window_s,
        drifts=tuple(s.drifts),
        known={world: StepSettings.from_proto(settings) for world, settings in s.known.items()},
        forgets=s.forgets,
        proposal=Proposal.from_proto(s.proposal) if s.HasField("proposal") else None,
    )
