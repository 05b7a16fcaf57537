"""Reads what a job's workers print, wherever they run: asks the daemons of its nodes, and merges lines by rank.

The job's newest generation tells which worker has which rank; workers of before are "earlier". Waits are bounded by
silence, never by the amount to read.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.base.errors import BaguaError, InfrastructureLost, UserError
from bagua_agent.cluster.cluster_records import UnreadableRecord, parse_node
from bagua_agent.cluster_client.arrivals import Arrivals
from bagua_agent.cluster_client.cluster_requests import outcome_of, unknown_job
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.large_jobs.stored_record import whole_value
from bagua_agent.security.grpc_security import why_not_served
from bagua_agent.workers.output.log_layout import path_component
from bagua_agent.workers.output.stream_lines import ShownLines
from bagua_contract import node_pb2, node_pb2_grpc
from bagua_contract.grpc_channel import open_channel
from bagua_contract.records import Generation

CALL_TIMEOUT_S = 10.0
SILENCE_S = 10.0  # of a stream that has more to send
LOOK_S = 1.0  # for workers that have come since
MOST_FAILURES = 3  # in a row, of a stream whose job has ended

STREAMS = {"out": node_pb2.ReadLogRequest.STDOUT, "err": node_pb2.ReadLogRequest.STDERR}


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """The place of one worker's output. global_rank: in the newest generation; None for an earlier worker."""

    node_name: str
    directory: str
    global_rank: int | None
    stdout_bytes: int = 0
    stderr_bytes: int = 0

    def bytes_of(self, stream: str) -> int:
        return self.stdout_bytes if stream == "out" else self.stderr_bytes

    @property
    def slot(self) -> str:
        """The part of the directory's name that names the slot."""
        return self.directory.partition("-")[0]

    @property
    def label(self) -> str:
        return f"{self.node_name}:{self.directory if self.global_rank is None else self.global_rank}"


def is_followed(output: WorkerOutput, rank: int | None, earlier: Container[tuple[str, str]]) -> bool:
    """Tells whether `logs --follow` shows this worker; pure.

    rank: the only one that is asked for; None: all there are, and all that come, even if they are replaced before a
    look finds them with a rank. earlier: node and directory of those that had no rank when following began.
    """
    if rank is not None:
        return output.global_rank == rank
    return output.global_rank is not None or (output.node_name, output.directory) not in earlier


def last_workers(outputs: Iterable[WorkerOutput]) -> list[WorkerOutput]:
    """Returns the workers of an ended job whose output is shown; pure. outputs: those of one node oldest first.

    These are the workers that have a rank; and the last one of each slot on nodes where none has one, since all had
    left before the last generation was written, as when the job was stopped.
    """
    shown = list(outputs)
    with_ranks = {output.node_name for output in shown if output.global_rank is not None}
    last = {(o.node_name, o.slot): o for o in shown if o.node_name not in with_ranks}
    return [o for o in shown if o.global_rank is not None or last.get((o.node_name, o.slot)) is o]


@dataclass(slots=True, eq=False)
class Tail:
    """One stream of a worker that is being read. It is changed by the reader's own thread alone.

    read_bytes: so many were read. size_bytes: as its node reported last. failed: attempts in a row. heard_s: when it
    was opened, or something came. call: under way, if it is open.
    """

    output: WorkerOutput
    read_bytes: int = 0
    size_bytes: int = 0
    failed: int = 0
    heard_s: float = 0.0
    call: Any = None
    shown: ShownLines = field(default_factory=ShownLines)

    def take(self, chunk: node_pb2.LogChunk, now_s: float) -> list[str]:
        """Adds a chunk, and returns the lines that are whole with it."""
        begin = chunk.position if chunk.HasField("position") else self.read_bytes
        # what began before a gap does not go on after it
        lines = self.finish() if begin > self.read_bytes else []
        self.read_bytes = begin + len(chunk.data)
        self.heard_s = now_s
        return [*lines, *self.shown.feed(chunk.data)]

    def missed(self, chunk: node_pb2.LogChunk) -> str:
        """Returns a line about what the next chunk leaves out since it is not kept any more; empty for nothing."""
        if not chunk.HasField("position") or chunk.position <= self.read_bytes:
            return ""
        gap = f"{chunk.position - self.read_bytes} bytes of its output"
        return (
            f"{self.output.label}: {gap} are not kept any more and not shown (jobs.max_log_mib of the node)"
        )

    def finish(self) -> list[str]:
        """Returns the last line, if nothing ends it."""
        return list(self.shown.end())

    @property
    def is_due(self) -> bool:
        """Whether there is more to read, and reading it has not failed again and again."""
        return self.size_bytes > self.read_bytes and self.failed < MOST_FAILURES


News = Arrivals[Tail, node_pb2.LogChunk | OperationEnd[None]]


class Next(Enum):
    OPEN = "open"
    BREAK = "break"
    NOTHING = "nothing"


def next_of(tail: Tail, now_s: float) -> Next:
    """Decides what to do about a stream now; pure. One that is silent though there is more is of a node that was
    away."""
    more = tail.size_bytes > tail.read_bytes
    if tail.call is None:
        return Next.OPEN if more else Next.NOTHING
    return Next.BREAK if more and now_s - tail.heard_s >= SILENCE_S else Next.NOTHING


class LogReader:
    """Reads the logs of one job. credentials: for calls to daemons; None: without TLS."""

    def __init__(self, store: Store, job_id: str, credentials: grpc.ChannelCredentials | None) -> None:
        self._store = store
        self._job_id = job_id
        self._credentials = credentials
        self._channels: dict[str, grpc.Channel] = {}

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def outputs(self, complain: Callable[[str], object]) -> list[WorkerOutput]:
        """Returns ranked outputs by rank, then earlier ones. complain: called with nodes that can't be asked. Raises
        UserError."""
        if self._store.get(cluster_keys.submission(self._job_id)) is None:
            raise unknown_job(self._store, self._job_id)
        ranks = self._ranks()
        found = []
        for node_name in sorted(self._addresses()):
            try:
                reply = self._stub(node_name)[1].ListLogs(
                    node_pb2.ListLogsRequest(job_id=self._job_id), timeout=CALL_TIMEOUT_S
                )
            except grpc.RpcError as error:
                complain(f"{node_name}: {self._why(error, node_name)}")
                continue
            except UserError as error:  # its daemon has gone since
                complain(str(error))
                continue
            found += [
                WorkerOutput(node_name, w.directory, ranks.get(w.directory), w.stdout_bytes, w.stderr_bytes)
                for w in reply.workers
            ]
        return sorted(found, key=lambda o: (o.global_rank is None, o.global_rank or 0, o.node_name))

    def lines(
        self, output: WorkerOutput, stream: str, last_bytes: int, complain: Callable[[str], object]
    ) -> Iterator[str]:
        """Yields the lines of one worker, to the end of what is there; of a progress bar its last state.

        last_bytes: 0 for all that is kept. complain: called with what is asked for and not kept any more. Raises
        UserError, InfrastructureLost. However long it is: only a silence of SILENCE_S ends it.
        """
        news: News = Arrivals()
        tail = Tail(output)
        call = self._open(tail, stream, news, last_bytes=last_bytes)
        try:
            while True:
                item = self._next(news, output)
                if not isinstance(item, node_pb2.LogChunk):
                    if isinstance(item, Failed):
                        raise item.error
                    break
                if (missed := tail.missed(item)) and (tail.read_bytes or not last_bytes):
                    complain(missed)
                yield from tail.take(item, 0.0)
            yield from tail.finish()
        finally:
            news.close()
            call.cancel()

    @staticmethod
    def _next(news: News, output: WorkerOutput) -> node_pb2.LogChunk | OperationEnd[None]:
        try:
            return news.get(SILENCE_S)[1]
        except queue.Empty:
            raise InfrastructureLost(
                f"the daemon of {output.node_name} has sent nothing for {SILENCE_S:g} s; is the node up?"
            ) from None

    def follow(
        self,
        wanted: Callable[[WorkerOutput], bool],
        streams: tuple[str, ...],
        tell: Callable[[WorkerOutput, str], object],
        complain: Callable[[str], object],
    ) -> None:
        """Passes on lines of all wanted workers as they come, of those too that come later or are replaced; until the
        job has ended and every line is read. A stream that breaks is opened again where it broke.

        wanted: asked until it returns True; from then on the worker is followed to its end. complain: called with what
        does not work now, each time. Raises UserError, InfrastructureLost if there is nothing to follow at the
        beginning.
        """
        news: News = Arrivals()
        tails: dict[tuple[str, str, str], Tail] = {}
        over, outputs = self._look(complain)
        looked_s = time.monotonic()
        try:
            while True:
                now_s = time.monotonic()
                for output in outputs:
                    for stream in streams:
                        name = (output.node_name, output.directory, stream)
                        if name not in tails and wanted(output):
                            tails[name] = Tail(output)
                        if name in tails:
                            self._keep_open(
                                tails[name], output.bytes_of(stream), stream, now_s, news, complain
                            )
                while (wait_s := looked_s + LOOK_S - time.monotonic()) > 0:
                    with contextlib.suppress(queue.Empty):
                        self._hear(*news.get(wait_s), tell, complain)
                if over and not any(tail.call is not None or tail.is_due for tail in tails.values()):
                    for tail in tails.values():
                        for line in tail.finish():
                            tell(tail.output, line)
                    return
                try:
                    over, outputs = self._look(complain)
                except InfrastructureLost as error:
                    complain(str(error))
                looked_s = time.monotonic()
        finally:
            news.close()
            for tail in tails.values():
                if tail.call is not None:
                    tail.call.cancel()

    def _look(self, complain: Callable[[str], object]) -> tuple[bool, list[WorkerOutput]]:
        """Returns whether the job is over, and the outputs there are: in this order, so that what an ended job wrote is
        all there."""
        over = outcome_of(self._store, self._job_id) is not None
        return over, self.outputs(complain)

    def _keep_open(
        self,
        tail: Tail,
        size_bytes: int,
        stream: str,
        now_s: float,
        news: News,
        complain: Callable[[str], object],
    ) -> None:
        tail.size_bytes = size_bytes
        if news.holds(tail):  # the terminal is slow; the node is not silent
            tail.heard_s = now_s
        match next_of(tail, now_s):
            case Next.OPEN:
                tail.heard_s = now_s
                try:
                    tail.call = self._open(tail, stream, news, from_bytes=tail.read_bytes, follow=True)
                except BaguaError as error:
                    tail.failed += 1
                    complain(str(error))
            case Next.BREAK:
                assert tail.call is not None
                tail.call.cancel()  # its end comes to `news`, and it is opened again
            case Next.NOTHING:
                pass

    @staticmethod
    def _hear(
        tail: Tail,
        item: node_pb2.LogChunk | OperationEnd[None],
        tell: Callable[[WorkerOutput, str], object],
        complain: Callable[[str], object],
    ) -> None:
        if isinstance(item, node_pb2.LogChunk):
            tail.failed = 0
            if missed := tail.missed(item):
                complain(missed)
            lines = tail.take(item, time.monotonic())
        else:
            tail.call = None
            if isinstance(item, Failed):
                tail.failed += 1
                complain(item.reason)
            lines = []  # what no newline ends yet may go on when the stream is opened again
        for line in lines:
            tell(tail.output, line)

    def _open(
        self,
        tail: Tail,
        stream: str,
        news: News,
        *,
        last_bytes: int = 0,
        from_bytes: int = 0,
        follow: bool = False,
    ) -> Any:
        """Begins to read a stream, and returns the call. Its chunks and then its end come to `news`, from a thread of
        its own. Raises UserError."""
        request = node_pb2.ReadLogRequest(
            job_id=self._job_id,
            directory=tail.output.directory,
            stream=STREAMS[stream],
            last_bytes=last_bytes,
            from_bytes=from_bytes,
            follow=follow,
        )
        address, stub = self._stub(tail.output.node_name)
        call = stub.ReadLog(request)

        def read() -> None:
            try:
                for chunk in call:
                    news.put(tail, chunk)
            except grpc.RpcError as error:
                raise why_not_served(error.code(), error.details(), address) from error

        background_thread("bagua-log", read, lambda end: news.put(tail, end)).start()
        return call

    def _ranks(self) -> dict[str, int]:
        """Returns the global ranks of the newest generation, by the directory of the worker."""
        keys = JobKeys(self._job_id)
        found = self._store.get(keys.generation)
        value = None if found is None else whole_value(self._store, keys, found.value)
        if value is None:
            return {}
        try:
            record = Generation.decode(value)
        except (DecodeError, ValueError) as error:
            raise UserError(
                f"{keys.generation} can't be read ({error}), so the ranks of the workers are unknown"
            ) from error
        return {
            f"slot{placement.slot}-{path_component(placement.worker_id)}": placement.global_rank
            for placement in record.members
        }

    def _addresses(self) -> dict[str, str]:
        """Returns the addresses of the daemons whose records can be read; `nodes` reports the others."""
        records, _ = self._store.get_prefix(cluster_keys.NODES)
        found = {}
        for kv in records:
            node_name = cluster_keys.id_in(cluster_keys.NODES, kv.key)
            if node_name is not None:
                with contextlib.suppress(UnreadableRecord):
                    found[node_name] = parse_node(kv.value, node_name).address
        return found

    def _stub(self, node_name: str) -> tuple[str, node_pb2_grpc.NodeServiceStub]:
        """Returns the address of a node's daemon, and a stub for calls to it. Raises UserError."""
        address = self._addresses().get(node_name)
        if address is None:
            raise UserError(
                f"node {node_name!r} has no daemon now; its logs lie there, under directories.log"
            )
        if address not in self._channels:
            self._channels[address] = open_channel(address, self._credentials)
        return address, node_pb2_grpc.NodeServiceStub(self._channels[address])  # type: ignore[no-untyped-call]

    def _why(self, error: grpc.RpcError, node_name: str) -> BaguaError:
        address = self._addresses().get(node_name, node_name)
        return why_not_served(error.code(), error.details(), address)
