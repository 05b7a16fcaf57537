"""Defines what studies leave for later jobs: a record per model, world and network, in the store beside the jobs. Pure.

The record is the first suggestion of the next study that has the same model, world and network. It decides nothing: the
study measures it beside the script's settings. So a record that is old or wrong costs one trial.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from bagua_agent.etcd.client import KeyValue
from bagua_contract import membership_pb2 as pb
from bagua_contract.step_settings import StepSettings

PREFIX = "/bagua/v1/tuned/"
MOST_RECORDS = 128  # in a store; the oldest give way
MOST_RECORD_BYTES = 64 << 10
_MODEL_KEYS = ("model", "algorithm", "sharding")  # of a fingerprint: what the settings are about
_LONGEST_WORDS = 200


@dataclass(frozen=True, slots=True)
class TunedFor:
    """The conditions that a record holds for. Each part in words; keys are their digests, since words may hold
    anything."""

    model: str
    world: str
    network: str

    @property
    def folder(self) -> str:
        """The prefix of the keys of all records of the model."""
        return f"{PREFIX}{_digest(self.model)}/"

    @property
    def key(self) -> str:
        return f"{self.folder}{_digest(f'{self.world}; {self.network}')}"


@dataclass(frozen=True, slots=True)
class Tuned:
    """One record. settings: the fastest that a study measured. steps_per_s: with them. scripted_steps_per_s: with the
    script's; 0: unknown. job_id: whose study it was."""

    place: TunedFor
    settings: StepSettings
    steps_per_s: float
    scripted_steps_per_s: float
    job_id: str
    found_unix_s: float

    def encode(self) -> bytes:
        return pb.Tuned(
            settings=self.settings.to_proto(),
            steps_per_s=self.steps_per_s,
            scripted_steps_per_s=self.scripted_steps_per_s,
            model=self.place.model,
            world=self.place.world,
            network=self.place.network,
            job_id=self.job_id,
            found_unix_s=self.found_unix_s,
        ).SerializeToString()

    @staticmethod
    def decode(value: bytes) -> Tuned:
        """Reads a record. Raises ValueError, DecodeError."""
        if len(value) > MOST_RECORD_BYTES:
            raise ValueError(f"it has {len(value)} bytes")
        r = pb.Tuned.FromString(value)
        if not all(math.isfinite(x) for x in (r.steps_per_s, r.scripted_steps_per_s, r.found_unix_s)):
            raise ValueError("it has rates or times that are no numbers")
        place = TunedFor(r.model, r.world, r.network)
        settings = StepSettings.from_proto(r.settings)
        return Tuned(place, settings, r.steps_per_s, r.scripted_steps_per_s, r.job_id, r.found_unix_s)


def model_of(fingerprint: Mapping[str, str]) -> str:
    """Returns in words what of a job's model its settings depend on. Empty if the fingerprint names no model."""
    if "model" not in fingerprint:
        return ""
    words = [fingerprint[key][:_LONGEST_WORDS] for key in _MODEL_KEYS if key in fingerprint]
    return "; ".join(words)


def network_of(bytes_per_s: float) -> str:
    """Describes the network in words, by powers of two. bytes_per_s: of a ring through all workers; 0: it was not
    measured."""
    return "not measured" if bytes_per_s <= 0 else f"2^{round(math.log2(bytes_per_s))} B/s"


def recalled(records: Mapping[str, Tuned], model: str, world: str, bytes_per_s: float) -> Tuned | None:
    """Returns the record of the same network, or of one that is up to twice as fast or slow: a measurement near the
    edge of two powers belongs to either."""
    if not model:
        return None
    for factor in (1.0, 0.5, 2.0) if bytes_per_s > 0 else (1.0,):
        found = records.get(TunedFor(model, world, network_of(bytes_per_s * factor)).key)
        if found is not None:
            return found
    return None


def read_all(found: Iterable[KeyValue]) -> tuple[dict[str, Tuned], list[str]]:
    """Returns the records that can be read, by key, and a complaint about each other one."""
    records, odd = {}, []
    for kv in found:
        try:
            record = Tuned.decode(kv.value)
            if record.place.key != kv.key:
                raise ValueError("it is about something else than its key")
            records[kv.key] = record
        except (DecodeError, ValueError) as error:
            odd.append(f"passing over {kv.key}: {error}")
    return records, odd


def beyond_bound(found: Iterable[KeyValue], written: str) -> list[str]:
    """Returns the keys to be removed once `written` is put: the ones that were written the longest ago."""
    others = sorted((kv for kv in found if kv.key != written), key=lambda kv: kv.mod_revision)
    return [kv.key for kv in others[: max(0, len(others) + 1 - MOST_RECORDS)]]


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:16]
