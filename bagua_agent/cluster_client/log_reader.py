"""What do a job's workers print, wherever they run? Asks the daemons of its nodes, and merges lines by rank.

Which worker has which rank is in the job's newest generation; workers that came before it are "earlier".
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from bagua_agent.cluster.cluster_records import UnreadableRecord, parse_node
from bagua_agent.cluster_client.cluster_requests import outcome_of, unknown_job
from bagua_agent.errors import BaguaError, UserError
from bagua_agent.large_jobs.stored_record import whole_value
from bagua_agent.service.grpc_security import why_not_served
from bagua_agent.store import cluster_keys
from bagua_agent.store.client import Store
from bagua_agent.store.keys import JobKeys
from bagua_agent.workers.log_layout import path_component
from bagua_agent.workers.stream_lines import ShownLines
from bagua_contract import node_pb2, node_pb2_grpc
from bagua_contract.records import Generation

CALL_TIMEOUT_S = 10.0
LOOK_S = 1.0  # for workers that have come since

STREAMS = {"out": node_pb2.ReadLogRequest.STDOUT, "err": node_pb2.ReadLogRequest.STDERR}


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """Where one worker's output lies. global_rank: in the newest generation; None for an earlier worker."""

    node_name: str
    directory: str
    global_rank: int | None

    @property
    def label(self) -> str:
        return f"{self.node_name}:{self.directory if self.global_rank is None else self.global_rank}"


class LogReader:
    """One job's. credentials: for calls to daemons; None: without TLS."""

    def __init__(self, store: Store, job_id: str, credentials: grpc.ChannelCredentials | None) -> None:
        self._store = store
        self._job_id = job_id
        self._credentials = credentials
        self._channels: dict[str, grpc.Channel] = {}

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def outputs(self, complain: Callable[[str], object]) -> list[WorkerOutput]:
        """Ranked ones by rank, then earlier ones. complain: told of nodes that can't be asked. Raises UserError."""
        if self._store.get(cluster_keys.submission(self._job_id)) is None:
            raise unknown_job(self._store, self._job_id)
        ranks = self._ranks()
        found = []
        for node_name in sorted(self._addresses()):
            try:
                reply = self._stub(node_name).ListLogs(
                    node_pb2.ListLogsRequest(job_id=self._job_id), timeout=CALL_TIMEOUT_S
                )
            except grpc.RpcError as error:
                complain(f"{node_name}: {self._why(error, node_name)}")
                continue
            found += [WorkerOutput(node_name, w.directory, ranks.get(w.directory)) for w in reply.workers]
        return sorted(found, key=lambda o: (o.global_rank is None, o.global_rank or 0, o.node_name))

    def lines(self, output: WorkerOutput, stream: str, last_bytes: int, follow: bool) -> Iterator[str]:
        """Of one worker; of a progress bar its last state. Raises UserError, InfrastructureLost."""
        request = node_pb2.ReadLogRequest(
            job_id=self._job_id,
            directory=output.directory,
            stream=STREAMS[stream],
            last_bytes=last_bytes,
            follow=follow,
        )
        lines = ShownLines()
        try:
            timeout_s = None if follow else CALL_TIMEOUT_S
            for chunk in self._stub(output.node_name).ReadLog(request, timeout=timeout_s):
                yield from lines.feed(chunk.data)
        except grpc.RpcError as error:
            raise self._why(error, output.node_name) from error
        yield from lines.end()

    def follow(
        self,
        wanted: Callable[[WorkerOutput], bool],
        streams: tuple[str, ...],
        tell: Callable[[WorkerOutput, str], object],
        complain: Callable[[str], object],
    ) -> None:
        """Lines of all wanted workers as they come, of those too that come later; until the job has ended."""
        news: queue.SimpleQueue[tuple[WorkerOutput, str] | None] = queue.SimpleQueue()
        begun: dict[tuple[str, str, str], threading.Thread] = {}

        def read(output: WorkerOutput, stream: str) -> None:
            try:
                for line in self.lines(output, stream, 0, follow=True):
                    news.put((output, line))
            except BaguaError as error:
                complain(str(error))
            except ValueError:
                return  # the channel is closed: the reader went away
            finally:
                news.put(None)

        while True:
            over = outcome_of(self._store, self._job_id) is not None
            for output in filter(wanted, self.outputs(complain)):
                for stream in streams:
                    name = (output.node_name, output.directory, stream)
                    if name not in begun:
                        begun[name] = threading.Thread(target=read, args=(output, stream), daemon=True)
                        begun[name].start()
            try:
                item = news.get(timeout=LOOK_S)
                while True:
                    if item is not None:
                        tell(*item)
                    item = news.get_nowait()
            except queue.Empty:
                if over and not any(thread.is_alive() for thread in begun.values()):
                    return

    def _ranks(self) -> dict[str, int]:
        """Global ranks of the newest generation, by the directory of the worker."""
        keys = JobKeys(self._job_id)
        found = self._store.get(keys.generation)
        value = None if found is None else whole_value(self._store, keys, found.value)
        if value is None:
            return {}
        try:
            record = Generation.decode(value)
        except (DecodeError, ValueError) as error:
            raise UserError(
                f"{keys.generation} can't be read ({error}), so nobody knows whose output is whose"
            ) from error
        return {
            f"slot{placement.slot}-{path_component(placement.worker_id)}": placement.global_rank
            for placement in record.members
        }

    def _addresses(self) -> dict[str, str]:
        """Of the daemons whose records can be read; `nodes` tells of the others."""
        records, _ = self._store.get_prefix(cluster_keys.NODES)
        found = {}
        for kv in records:
            node_name = cluster_keys.id_in(cluster_keys.NODES, kv.key)
            if node_name is not None:
                with suppress(UnreadableRecord):
                    found[node_name] = parse_node(kv.value, node_name).address
        return found

    def _stub(self, node_name: str) -> node_pb2_grpc.NodeServiceStub:
        address = self._addresses().get(node_name)
        if address is None:
            raise UserError(
                f"node {node_name!r} has no daemon now; its logs lie there, under directories.log"
            )
        if address not in self._channels:
            if self._credentials is None:
                self._channels[address] = grpc.insecure_channel(address)
            else:
                self._channels[address] = grpc.secure_channel(address, self._credentials)
        return node_pb2_grpc.NodeServiceStub(self._channels[address])  # type: ignore[no-untyped-call]

    def _why(self, error: grpc.RpcError, node_name: str) -> BaguaError:
        address = self._addresses().get(node_name, node_name)
        return why_not_served(error.code(), error.details(), address)
