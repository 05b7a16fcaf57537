"""Performs the tuning of a job on its agents: passes measurements on, and, on the leader, takes the study's steps.

study.py decides. A step has effect once its record is in the store, fenced by the leader's key: every agent then sees
the settings that are wanted, and the leader's membership machine writes a generation with them. A new leader goes on
with the record. Runs in the loop's thread; the sampler's process is waited for in a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from google.protobuf.message import DecodeError

from bagua_agent.autotune import sampling
from bagua_agent.autotune.measuring import Measuring
from bagua_agent.autotune.messages import Recalled, Suggested
from bagua_agent.autotune.prediction import link_of
from bagua_agent.autotune.proposal import Workers
from bagua_agent.autotune.records import (
    decode_measured,
    decode_study,
    encode_measured,
    encode_study,
    options_of,
)
from bagua_agent.autotune.space import Facts, Space, space_of
from bagua_agent.autotune.study import PINNED, Situation, step
from bagua_agent.autotune.study_records import Measured, Study
from bagua_agent.autotune.tuned_records import Tuned, TunedFor, model_of, network_of, recalled
from bagua_agent.autotune.tuned_store import keep_tuned, read_tuned
from bagua_agent.base.background import Background, Failed, OperationEnd
from bagua_agent.base.plain_text import counted
from bagua_agent.etcd.mirror import Change
from bagua_agent.history import job_history
from bagua_agent.job_state.context import JoinedJob
from bagua_contract import session_pb2
from bagua_contract.records import Generation
from bagua_contract.step_settings import (
    QADAM_OPTIMIZER,
    SWITCHABLE,
    StepSettings,
    declared_algorithm,
    takes,
    takes_settings,
    why_not_qadam,
)

PASS_ON_EVERY_S = 0.4  # less than workers take between two reports: none is dropped for a late one before it
SAMPLER_FAILURES = 3  # in a row, before a study goes on without
WRITE_AGAIN_S = 2.0


class Tuner:
    """Tunes one job, on each of its agents. write_study(value): as the leader, fenced. tell(message): to the loop, from
    any thread."""

    def __init__(
        self,
        job: JoinedJob,
        write_study: Callable[[bytes], None],
        tell: Callable[[object], None],
        verbose: bool,
    ) -> None:
        self._job = job
        self._write_study = write_study
        self._tell = tell
        self._verbose = verbose
        self.options = options_of(job.seen.spec)
        self._measuring = Measuring()
        self._passed_on_s = float("-inf")
        self._measured: Measured | None = None
        self._stored = b""
        self._study: Study | None = None  # of this leadership
        self._written_s = float("-inf")
        self._sampler = Background("bagua-sampler")
        self._reader = Background("bagua-tuned")
        self._recalled: Recalled | None = None  # of this leadership
        self._is_reading = False
        self._is_asked = False
        self._suggested: StepSettings | None = None
        self._failures = 0
        self._gave_up = ""

    @property
    def is_on(self) -> bool:
        return self.options.level > 0 and not self._job.seen.restarts

    @property
    def study(self) -> Study | None:
        """The newest study that is known here; None before the first."""
        return self._study or self._read()

    def stop(self) -> None:
        self._sampler.stop()
        self._reader.stop()

    # -- on the agent of global rank 0

    def said(self, worker_id: str, message: session_pb2.WorkerMessage, now_s: float) -> None:
        """Takes a message of a worker here, and passes its measurement on."""
        if not self.is_on or message.WhichOneof("kind") != "progress":
            return
        job = self._job
        found = self._measuring.take(worker_id, message.progress, job.seen.generation)
        if found is not None and now_s - self._passed_on_s >= PASS_ON_EVERY_S:
            self._passed_on_s = now_s
            value = encode_measured(found)
            job.writes.until_done("steps measured", lambda: job.store.put(job.keys.measured, value))

    # -- on the leader

    def saw(self, changes: tuple[Change, ...], now_s: float, *, leads: bool) -> None:
        """Takes changes of the job's keys. leads: this agent does."""
        if not self.is_on:
            return
        for change in changes:
            if change.key == self._job.keys.study:
                self._stored = change.value or b""
            elif change.key == self._job.keys.measured and change.value is not None:
                try:
                    self._measured = decode_measured(change.value)
                except (DecodeError, ValueError) as error:
                    self._job.terminal.tell_once("measured", f"passing over {change.key}: {error}")
        self._look(now_s, leads=leads)

    def suggested(self, message: Suggested, now_s: float, *, leads: bool) -> None:
        self._is_asked = False
        study = self._study
        if study is None or study.number != message.study:
            return  # of a world that is gone
        if message.settings is not None:
            self._suggested, self._failures = message.settings, 0
        elif message.why:
            self._failures += 1
            self._job.terminal.tell_once("sampler", message.why)
            if self._failures >= SAMPLER_FAILURES:
                self._gave_up = f"the sampler failed {self._failures} times in a row ({message.why})"
        else:
            self._gave_up = "all settings were tried"
        self._look(now_s, leads=leads)

    def recalled(self, message: Recalled, now_s: float, *, leads: bool) -> None:
        self._is_reading = False
        for problem in message.problems:
            self._job.terminal.tell_once("tuned", problem)
        if message.forgets == self._job.seen.view.forgets:
            self._recalled = message
        self._look(now_s, leads=leads)

    def _look(self, now_s: float, *, leads: bool) -> None:
        seen = self._job.seen
        if not leads or seen.result is not None:
            self._study = self._recalled = self._suggested = None
            self._failures, self._gave_up = 0, ""
            return
        record = seen.generation
        if record is None or not record.members or record.is_gathering:
            return
        if not takes_settings(record.fingerprint):
            declared = record.fingerprint["algorithm"]
            self._job.terminal.tell_once(
                "algorithm", f"autotune: algorithm {declared[:80]} takes no settings; nothing is tuned"
            )
            return
        forgets = seen.view.forgets
        if self._recalled is None or self._recalled.forgets != forgets:
            self._recall(forgets)
            return  # a study begins with what is known
        before = self._study or self._read() or Study()
        measured = self._measured
        space = self._space(record)
        place = self._place(record)
        found = recalled(self._recalled.records, place.model, place.world, self._ring_bytes_per_s(record))
        result = step(
            before,
            Situation(
                world=place.world,
                space=space,
                options=self.options,
                measured=measured,
                in_force=measured is not None
                and measured.generation == record.number
                and record.settings == seen.view.pinned_settings.over(before.current),
                suggested=self._suggested,
                sampler_gave_up=self._gave_up,
                recalled=None if found is None else found.settings,
                recalled_from="" if found is None else found.job_id,
                forgets=forgets,
                workers=self._workers(record),
                waits_for_warm_up=measured is not None and measured.warms_up and self._wants_qadam(record),
            ),
        )
        study = self._study = result.study
        if study.number != before.number:
            self._suggested, self._failures, self._gave_up = None, 0, ""
        elif study.current == self._suggested or self._suggested in study.tried:
            self._suggested = None
        if result.event:
            self._tell_event(study, result.event)
        if _written(study) != _written(before) or (
            encode_study(study) != self._stored and now_s - self._written_s >= WRITE_AGAIN_S
        ):
            self._written_s = now_s
            self._write_study(encode_study(study))
        if result.settles and place.model:
            self._keep(study, place)
        if result.asks and not self._is_asked:
            self._ask(study, space)

    def _place(self, record: Generation) -> TunedFor:
        """Returns the conditions for which this study's findings hold."""
        world = world_of(record, self._job.seen.view.pinned_settings)
        return TunedFor(model_of(record.fingerprint), world, network_of(self._ring_bytes_per_s(record)))

    def _workers(self, record: Generation) -> Workers:
        pinned = self._job.seen.view.pinned_settings.algorithm
        can = self._allowed(record) or tuple(name for name in SWITCHABLE if takes(name, record.fingerprint))
        algorithm = pinned or declared_algorithm(record.fingerprint)
        return Workers(record.node_count, record.world_size, algorithm, can)

    def _wants_qadam(self, record: Generation) -> bool:
        """Tells whether some trial of a study has qadam."""
        return "qadam" in (self._workers(record).algorithm, *self._allowed(record))

    def _allowed(self, record: Generation) -> tuple[str, ...]:
        """Returns the algorithms that the user allowed and the job can switch to."""
        allowed, optimizers = self.options.algorithms, record.fingerprint.get("optimizers", "")
        found = tuple(name for name in allowed if takes(name, record.fingerprint))
        if len(found) < len(allowed):
            why_not = (
                why_not_qadam(record.fingerprint)
                if optimizers == QADAM_OPTIMIZER
                else f"the script's optimizer is {optimizers or 'unknown'}, and qadam needs "
                "bagua.algorithms.QAdamOptimizer, whose second moment stays as it is after a warm-up"
            )
            self._job.terminal.tell_once("qadam", f"autotune: qadam is left out: {why_not}")
        return found

    def _ring_bytes_per_s(self, record: Generation) -> float:
        link = None if self._measured is None else link_of(self._measured.buckets, record.world_size)
        return 0.0 if link is None else link.bytes_per_s

    def _recall(self, forgets: int) -> None:
        if self._is_reading:
            return
        self._is_reading = True

        def ended(end: OperationEnd[tuple[dict[str, Tuned], list[str]]]) -> None:
            if isinstance(end, Failed):
                why = f"what earlier jobs found can't be read: {end.reason}"
                self._tell(Recalled({}, forgets, (why,)))
            else:
                records, odd = end.value
                self._tell(Recalled(records, forgets, tuple(odd)))

        self._reader.run("reading what earlier jobs found", lambda: read_tuned(self._job.store), ended)

    def _keep(self, study: Study, place: TunedFor) -> None:
        best = study.best
        assert best is not None
        record = Tuned(
            place, best.settings, best.rate, study.scripted_rate, self._job.keys.job_id, time.time()
        )
        self._job.writes.until_done("what was tuned", lambda: keep_tuned(self._job.store, record))

    def _read(self) -> Study | None:
        if not self._stored:
            return None
        try:
            return decode_study(self._stored)
        except (DecodeError, ValueError) as error:
            self._job.terminal.tell_once(
                "study", f"passing over {self._job.keys.study}: {error}; a new study begins"
            )
            return None

    def _space(self, record: Generation) -> Space:
        nodes = [m.agent_id for m in record.members]
        measured = self._measured or Measured(0, 0, 0.0)
        return space_of(
            Facts(
                gradient_bytes=measured.gradient_bytes,
                order=measured.order,
                crosses=1 < len(set(nodes)) < len(nodes),
                algorithms=self._allowed(record),
                pinned=self._job.seen.view.pinned_settings,
            )
        )

    def _tell_event(self, study: Study, text: str) -> None:
        self._job.history.of_job(job_history.tried(study.number, len(study.trials), text))
        if self._verbose or not text.startswith("trial"):
            self._job.terminal.tell(f"autotune: {text}")

    def _ask(self, study: Study, space: Space) -> None:
        self._is_asked = True

        def ended(end: OperationEnd[StepSettings | None]) -> None:
            if isinstance(end, Failed):
                self._tell(Suggested(study.number, None, end.reason))
            else:
                self._tell(Suggested(study.number, end.value))

        self._sampler.run("asking the sampler", lambda: sampling.suggest(study, space), ended)


def world_of(record: Generation, pinned: StepSettings) -> str:
    """Returns in words what a study's measurements hold for."""
    world = f"{counted(record.world_size, 'worker')} on {counted(record.node_count, 'node')}"
    return world if pinned.is_empty else f"{world}{PINNED}{pinned}"


def _written(study: Study) -> Study:
    """Returns the study as it is written. What every measurement changes is written with the next change of the rest; a
    new leader counts it again."""
    return replace(
        study,
        trained_s=0.0,
        lost_s=0.0,
        change_s=0.0,
        generation=0,
        steps=0,
        seconds=0.0,
        before_steps=0,
        before_s=0.0,
        window_steps=0,
        window_s=0.0,
    )
