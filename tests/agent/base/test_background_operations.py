"""Every background operation of the agent, met with every kind of error: one event, no more, and no thread left.

The list of operations is read off the sources: one without an entry in OPERATIONS fails the first test.
"""

from __future__ import annotations

import ast
import json
import os
import queue
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

import bagua_agent
from bagua_agent.base import pid_watch
from bagua_agent.base.background import Background, Failed, OperationEnd, background_thread
from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.base.pid_watch import PidWatch
from bagua_agent.base.retrying_writes import DesiredWrites
from bagua_agent.base.signals import SignalsToInbox
from bagua_agent.base.timers import Timers
from bagua_agent.cluster_client import trace_reader
from bagua_agent.cluster_client.log_reader import LogReader, Tail, WorkerOutput
from bagua_agent.dashboard import collector, page_loop
from bagua_agent.etcd.client import absent
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.failures import CallFailed
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.leased_keys import KeepingEnded, LeasedKeys, StoreAway
from bagua_agent.etcd.login import Login
from bagua_agent.etcd.mirror import PrefixMirror
from bagua_agent.etcd.server.hosted import HostedEtcd
from bagua_agent.history import history_writer
from bagua_agent.history.history_writer import HistoryWriter
from bagua_agent.job.loop_watch import LoopWatch
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.leadership import probes
from bagua_agent.leadership.leadership import Leadership
from bagua_agent.leadership.reports import Report
from bagua_agent.membership.actions import Question, ResultOutcome
from bagua_agent.membership.hang import HangOrder, HangOutcome
from bagua_agent.node import hang_orders
from bagua_agent.node.hang_orders import HangOrders
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.torchrun.file_timers import FileTimers
from bagua_agent.node.torchrun.health_server import health_server
from bagua_agent.rpc.message_pace import MessagePace
from bagua_agent.rpc.session_server import SessionServer
from bagua_agent.rpc.trace_relay import TraceRelay
from bagua_agent.service.blocking_work import BlockingWork, ThisNode
from bagua_agent.service.node.log_service import LogService
from bagua_agent.service.node.node_facts import NodeFacts
from bagua_agent.service.scheduling.scheduler import Scheduler
from bagua_agent.service.state_machine import messages as ms
from bagua_agent.workers.exits.exit_watch import ExitWatch
from bagua_agent.workers.output.log_layout import LogLayout
from bagua_agent.workers.output.output_options import OutputOptions
from bagua_agent.workers.output.router import OutputRouter
from bagua_agent.workers.start.warm_parent import WarmParent
from bagua_contract import cluster_pb2 as pb
from bagua_contract import session_pb2
from bagua_contract.records import PROTOCOL_VERSION, Generation, GenerationKind
from tests.agent.base.operation_place import DEADLINE_S, Place
from tests.agent.base.test_background import ERROR_NAMES, ERRORS
from tests.agent.base.tuner_operations import asking_a_sampler, reading_what_was_tuned
from tests.lab.wait import eventually

LEADER_WRITES: tuple[Callable[[Leadership], object], ...] = (
    lambda leads: leads.election.stand("a", "host:1"),
    lambda leads: leads.election.remove_dead_leader("b", 1, 7, ["b.0"]),
    lambda leads: leads.writes.write_generation(
        Generation(1, 0, GenerationKind.FAILOVER, (), "nonce"), 0, absent("result"), {}
    ),
    lambda leads: leads.writes.write_result(absent("result"), ResultOutcome.SUCCEEDED, 0, "done", None),
    lambda leads: leads.writes.refuse("w", "another model"),
    lambda leads: leads.writes.write_hang_order(None),
    lambda leads: leads.writes.remove_agent("b", 1, ["b.0"]),
)


def leads(place: Place) -> Leadership:
    failing = SimpleNamespace(transact=place.fail, put_if_absent=place.fail)
    report: Callable[[Report], None] = place.events.put
    made = Leadership(
        cast(Any, failing), JobKeys("job"), cast(Any, failing), cast(Any, None), 0.5, report, place.fail
    )
    return made


def leader_writes(place: Place) -> None:
    made = leads(place)
    for number, write in enumerate(LEADER_WRITES, 1):
        write(made)
        place.one_event()
        assert place.met == number
    made.stop()


def leader_probes(place: Place) -> None:
    place.patch(probes, "probe", place.fail)
    place.patch(probes, "probe_through", place.fail)
    made = leads(place)
    made.probes.ask(Question("b", "10.0.0.1:1", "c", "10.0.0.2:1"), 1)
    place.one_event()  # of the direct question
    place.one_event()  # of the relayed one
    made.stop()


def touches(place: Place) -> None:
    place.patch(probes, "reach_all", place.fail)
    made = leads(place)
    made.probes.touch({"b": "10.0.0.1:1"})
    place.one_event()
    made.stop()


def timer_events(place: Place) -> Timers:
    return Timers(lambda: place.events.put("timer"))


def desired_writes(place: Place) -> None:
    writes = DesiredWrites(timer_events(place))
    writes.until_done("record", place.fail)
    place.one_event()
    writes.stop()


def saving_stacks(place: Place) -> None:
    place.patch(hang_orders, "save_stacks", place.fail)
    job = SimpleNamespace(timers=timer_events(place), terminal=JobTerminal(lambda line: None, "host"))
    orders = HangOrders(cast(Any, job), cast(Any, SimpleNamespace(stack_targets=list)))
    orders.take(HangOrder(3, HangOutcome.NAME, ("w",), "1 of 3 wait"))
    place.one_event()
    orders.stop()


def daemons_hands(place: Place) -> None:
    work = object.__new__(BlockingWork)  # of it the hands and the inbox
    work._hands, work._inbox = Background("bagua-hands"), place.events.put
    work._runner = cast(Any, SimpleNamespace(found=place.fail, kill=place.fail))
    work._store = cast(Any, SimpleNamespace(transact=place.fail))
    work._logs = cast(Any, SimpleNamespace(remove=place.fail))
    work._config = cast(Any, SimpleNamespace(node_name="n0"))
    actions: tuple[ms.Action, ...] = (
        ms.LookForUnits(),
        ms.ActOnUnit("job", ms.UnitAct.KILL),
        ms.PutBack("key", b"", "nonce"),
        ms.TellFailure(pb.Submission(job_id="job"), 1, "its agent ended with 1"),
        ms.RemoveLogs("gone", "nonce"),
    )
    for action in actions:
        work.perform(action)
        place.one_event()
    work._hands.stop()


def looking_at_the_node(place: Place) -> None:
    work = object.__new__(BlockingWork)  # of it the looks and the inbox
    work._looks, work._inbox = Background("bagua-looks"), place.events.put
    work._this_node = ThisNode(NodeFacts(1, 0, "boot"), "127.0.0.1:1", "0", place.fail)
    work.perform(ms.LookAtNode())
    place.one_event()
    work._looks.stop()


def exits_of_workers(place: Place) -> None:
    place.patch(pid_watch, "readable", place.fail)
    watch = ExitWatch(lambda worker, code: None, place.events.put)
    watch.start()
    place.one_event()
    watch.stop()


def output_of_workers(place: Place) -> None:
    place.patch(OutputRouter, "_is_done", place.fail)
    layout = LogLayout(place.directory, "job", "host")
    router = OutputRouter(OutputOptions.parse(), layout, on_failed=place.events.put)
    router.start()
    place.one_event()
    router.stop()


def watch_of_the_warm_parent(place: Place) -> None:
    parent = object.__new__(WarmParent)
    parent._lock = threading.Lock()
    parent._end = lambda: place.events.put("spawned from now on")  # type: ignore[method-assign]
    place.patch(WarmParent, "_run_watch", place.fail)
    thread = background_thread("warm-parent-watch", parent._run_watch, parent._watch_ended)
    thread.start()
    place.one_event()
    thread.join(DEADLINE_S)


def warming(place: Place) -> None:
    workers = SimpleNamespace(_warm=SimpleNamespace(wait_ready=place.fail), _warming=None)
    NodeWorkers.when_startable(cast(NodeWorkers, workers), lambda: place.events.put("startable"))
    place.one_event()
    cast(Any, workers._warming).join(DEADLINE_S)


def ends_of_units(place: Place) -> None:
    place.patch(pid_watch, "readable", place.fail)
    watch = PidWatch[str]("ends", lambda name: None, place.events.put)
    watch.start()
    place.one_event()
    watch.stop()


def sessions(place: Place) -> None:
    server = object.__new__(SessionServer)  # without gRPC's part
    server._lock, server._expected, server._outboxes, server._welcome = threading.Lock(), {"w"}, {}, None
    server._paces, server.traces = defaultdict(MessagePace), TraceRelay(server._tell_trace)
    server._on_ended = place.events.put
    server._on_message = lambda worker_id, message: place.fail() if message.HasField("ready") else None
    hello = session_pb2.Hello(protocol=PROTOCOL_VERSION, worker_id="w")
    said = [session_pb2.WorkerMessage(hello=hello), session_pb2.WorkerMessage(ready=session_pb2.Ready())]
    context = SimpleNamespace(add_callback=lambda callback: None, cancel=lambda: None)
    assert list(server.Attach(iter(said), cast(Any, context))) == [], "the session ends"
    place.one_event()
    assert server._outboxes == {}, "the worker may come again"


def hosted_etcd(place: Place) -> None:
    server = SimpleNamespace(endpoint="", directory=place.directory, pid=2**30, stop=lambda: None)
    place.patch(HostedEtcd, "_await_end", place.fail)
    etcd = HostedEtcd(cast(Any, server), "")
    etcd.keep_up(lambda pid: None, place.events.put)
    place.one_event()
    etcd.stop()


def logs(place: Place) -> None:
    class Call:
        def __iter__(self) -> Iterator[object]:
            return place.fail()  # type: ignore[no-any-return]

    reader = LogReader(cast(Any, None), "job", None)
    stub = SimpleNamespace(ReadLog=lambda request: Call())
    place.patch(LogReader, "_stub", lambda reader, node_name: ("host:1", stub))
    arrivals = SimpleNamespace(put=lambda tail, item: place.events.put(item))
    reader._open(Tail(WorkerOutput("host", "slot0-w", 0)), "out", cast(Any, arrivals))
    place.one_event()


def tracing(place: Place) -> None:
    class Call:
        def __iter__(self) -> Iterator[Any]:
            return place.fail()  # type: ignore[no-any-return]

    trace_reader.following("a", Call(), place.events.put).start()
    place.one_event()


def timers_of_scripts(place: Place) -> None:
    place.patch(FileTimers, "_run", place.fail)
    timers = FileTimers(place.directory / "timers", lambda pid, number: False)
    place.patch(timers, "_ended", place.events.put)
    timers._thread = background_thread("file-timers", timers._run, timers._ended)
    timers.start()
    place.one_event()
    timers.stop()


def health_checks(place: Place) -> None:
    server = health_server(0, lambda asked: None)
    assert server._server is not None
    place.patch(server._server, "serve_forever", place.fail)
    place.patch(server, "_ended", place.events.put)
    server.start()
    place.one_event()
    assert server._thread is not None
    server._thread.join(DEADLINE_S)
    server._server.server_close()


def logs_served(place: Place) -> None:
    service = LogService(place.fail, place.events.put, lambda text: None)
    service.start()
    place.one_event()
    service.stop()


def test_logs_are_served_once_the_port_can_be_had_whatever_was_raised_before() -> None:
    notes: queue.SimpleQueue[object] = queue.SimpleQueue()
    raised = [InfrastructureLost("no file to be had"), RuntimeError("can't start new thread")]
    stopped = threading.Event()

    def make() -> object:
        if raised:
            raise raised.pop(0)
        return SimpleNamespace(stop=stopped.set)

    service = LogService(cast(Any, make), notes.put, lambda text: None, try_again_s=0.01)
    service.start()
    said = [notes.get(timeout=DEADLINE_S) for _ in range(3)]
    assert "no file to be had" in str(said[0]) and "can't start new thread" in str(said[1]) and said[2] == ""
    service.stop()
    assert stopped.is_set() and notes.empty()


def writing_history(place: Place) -> None:
    for level in ("warning", "exception", "error"):
        place.patch(history_writer.log, level, lambda *words: place.events.put(words))
    place.patch(history_writer, "RETRY_S", 0.01)
    writer = HistoryWriter(cast(Any, SimpleNamespace(transact=place.fail)))
    writer.write("key", b"")
    if isinstance(place.error, InfrastructureLost):
        eventually(lambda: place.met > 1, DEADLINE_S, "the event is tried again")
    else:
        place.one_event()
    writer.stop()


def looking_at_a_job(place: Place) -> None:
    place.patch(collector, "read_facts", place.fail)
    place.patch(page_loop.log, "warning", lambda *words: place.events.put(words))
    looking = collector.Collector(cast(Any, None), "demo", unwatched_s=0.01)
    if isinstance(place.error, Exception):
        eventually(lambda: place.met > 1, DEADLINE_S, "the job is looked at again")
        assert str(place.error) in json.loads(looking.page())["problem"]
    else:
        place.one_event()
    looking.stop()


def sending_to_a_collector(place: Place) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install bagua-elastic[otel]")
    from bagua_agent.metrics import otel_export
    from bagua_agent.metrics.otel_settings import OtelSettings

    place.patch(otel_export.log, "warning", lambda *words: place.events.put(words))
    settings = OtelSettings("http://127.0.0.1:1/v1/metrics", None, 60.0)
    export = otel_export.OtelExport(settings, "demo", "h1", place.fail, place.events.put)
    place.one_event()
    export.stop()


def watching_the_loop(place: Place) -> None:
    watch = LoopWatch(tick_s=0.001)
    watch.start(place.fail, place.events.put)
    place.one_event()
    watch.stop()


def scheduling(place: Place) -> None:
    given_up: list[str] = []
    leased = SimpleNamespace(remove=given_up.append)
    scheduler = Scheduler(cast(Any, None), cast(Any, leased), "n0", place.events.put)
    place.patch(scheduler, "_stand", place.fail)
    scheduler._thread.start()
    if isinstance(place.error, InfrastructureLost):
        eventually(lambda: place.met > 1, DEADLINE_S, "it is tried again")
    else:
        place.one_event()
        eventually(lambda: len(given_up) == 1, DEADLINE_S, "another node may schedule")
    scheduler.stop()


def keeping_leased_keys(place: Place) -> None:
    leased = LeasedKeys(cast(Any, SimpleNamespace(lease_grant=place.fail)), 1.0, place.events.put)
    outage = place.events.get(timeout=DEADLINE_S)
    assert isinstance(outage, StoreAway if isinstance(place.error, Exception) else KeepingEnded)
    leased.close()


def logging_in(place: Place) -> None:
    login = Login("ann", "ann-secret", lambda endpoint: grpc.insecure_channel(endpoint.target))
    place.patch(login, "_log_in", place.fail)
    with pytest.raises(CallFailed) as raised:
        login.metadata(parse_endpoint("127.0.0.1:1"), DEADLINE_S, lambda: False)
    assert raised.value.failure.certainly_not_done


def watching_the_store(place: Place) -> None:
    def outage(connected: bool) -> None:
        if not connected:
            place.events.put("away")

    store = SimpleNamespace(
        get_ranges=lambda ranges, timeout_s: ([], 1),
        config=StoreConfig((parse_endpoint("host:1"),)),
    )
    mirror = PrefixMirror(cast(Any, store), "/", lambda changes: None, outage)
    place.patch(mirror, "_follow", place.fail)
    mirror._tell_connection(True)
    mirror.start()
    place.one_event()
    mirror.stop()


def hearing_signals(place: Place) -> None:
    def ended(heard: SignalsToInbox, end: OperationEnd[object]) -> None:
        if isinstance(end, Failed):
            place.events.put(end)

    place.patch(SignalsToInbox, "_ended", ended)
    with SignalsToInbox(["SIGUSR1"], place.fail):
        for number in (1, 2):  # the thread goes on
            os.kill(os.getpid(), signal.SIGUSR1)
            place.one_event()
            assert place.met == number


OPERATIONS: dict[str, Callable[[Place], None]] = {
    "bagua-leader": leader_writes,
    "bagua-probe": leader_probes,
    "bagua-touch": touches,
    "bagua-writer": desired_writes,
    "bagua-stacks": saving_stacks,
    "bagua-hands": daemons_hands,
    "bagua-looks": looking_at_the_node,
    "exit-watch": exits_of_workers,
    "worker-output": output_of_workers,
    "warm-parent-watch": watch_of_the_warm_parent,
    "bagua-warming": warming,
    "bagua-pid-watch": ends_of_units,
    "bagua-session-in": sessions,
    "bagua-hosted-etcd": hosted_etcd,
    "bagua-log": logs,
    "bagua-trace": tracing,
    "file-timers": timers_of_scripts,
    "small-http": health_checks,
    "bagua-logs": logs_served,
    "bagua-history": writing_history,
    "bagua-dashboard": looking_at_a_job,
    "bagua-otel": sending_to_a_collector,
    "bagua-sampler": asking_a_sampler,
    "bagua-tuned": reading_what_was_tuned,
    "bagua-scheduler": scheduling,
    "bagua-loop-watch": watching_the_loop,
    "leased-keys": keeping_leased_keys,
    "etcd-login": logging_in,
    "store-mirror": watching_the_store,
    "signals": hearing_signals,
}


NAMED_FIRST = ("Background", "PidWatch", "background_thread")


def named_in_the_sources() -> set[str]:
    """The names that executors and threads of background.py are given, a watch's thread by who makes the watch."""
    names = set()
    for path in Path(bagua_agent.__file__).parent.rglob("*.py"):
        if path == Path(pid_watch.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
            if isinstance(called, ast.Name) and called.id in NAMED_FIRST:
                assert isinstance(node.args[0], ast.Constant), path
                names.add(str(node.args[0].value))
    return names


def test_every_operation_is_here() -> None:
    assert set(OPERATIONS) == named_in_the_sources()


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("make", ERRORS, ids=ERROR_NAMES)
def test_whatever_it_meets_is_one_event(
    operation: Callable[[Place], None],
    make: Callable[[], BaseException],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    before = set(threading.enumerate())
    place = Place(make(), monkeypatch, tmp_path)
    operation(place)
    deadline_s = time.monotonic() + DEADLINE_S
    for thread in set(threading.enumerate()) - before:
        thread.join(deadline_s - time.monotonic())
        assert not thread.is_alive(), f"{thread.name} is left"
    assert place.met, "the fault happened"
    assert place.events.empty(), "and nothing after its event"
