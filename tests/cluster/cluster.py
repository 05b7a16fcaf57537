"""A cluster in the lab: daemons on hosts, a real etcd, jobs submitted as people do, checked as fault tests check."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil

from bagua_agent.base.sizes import SizePolicy
from bagua_agent.cluster.cluster_records import PROTOCOL, parse_submission, read_node, read_orders
from bagua_agent.cluster.cluster_view import NodeView, OrderView
from bagua_agent.cluster_client import cluster_requests
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.config.job_config_file import SUBMITTED, encode
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.security.certificate_files import issue_files, utc_now
from bagua_agent.security.certificates import Role
from bagua_contract import cluster_pb2 as pb
from bagua_contract import membership_pb2
from bagua_contract.records import Generation
from tests.faults.job import ROOT, SCRIPT
from tests.lab import ledger
from tests.lab.etcd import EtcdCluster
from tests.lab.forward import Forward
from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

DEADLINE_S = 60.0
POLL_S = 0.05  # each look reads files or etcd
STEP_S = 1.2  # until a test lets the job hurry: two minutes, so none ends before
STOP_DEADLINE_S = 20.0  # also while etcd has no leader

CONFIG = """
insecure = true
[etcd]
endpoints = [{endpoints}]
[node]
name = "{name}"
slots = {slots}
[jobs]
users = ["root"]
environment = ["PYTHONPATH", "OMP_NUM_THREADS"]
metrics = {metrics}
otel = "{otel}"
[directories]
state = "{directory}/state"
log = "{directory}/log"
[times]
node_lease_s = {node_lease_s}
[dashboard]
listen = "{dashboard}"
"""


class Daemon:
    """One node's; its units outlive it."""

    def __init__(self, cluster: Cluster, host: Host, slots: int) -> None:
        self.cluster = cluster
        self.host = host
        self.name = host.name
        self.directory = cluster.directory / host.name
        self.directory.mkdir()
        endpoints = ", ".join(f'"{e}"' for e in cluster.etcd.endpoints.split(","))
        self.config = self.directory / "agent.toml"
        self.config.write_text(
            CONFIG.format(
                endpoints=endpoints,
                name=self.name,
                slots=slots,
                directory=self.directory,
                node_lease_s=cluster.node_lease_s,
                dashboard=cluster.dashboard,
                metrics="true" if cluster.dashboard else "false",
                otel=cluster.otel,
            )
            + ("" if cluster.authority is None else self._tls(cluster.authority))
        )
        self.log = self.directory / "daemon.log"
        self.process: LabProcess | None = None

    def _tls(self, authority: Path) -> str:
        issued = issue_files(authority, self.name, Role.AGENT, (self.name, self.host.address), now=utc_now())
        files = {"ca_file": issued.ca_file, "cert_file": issued.cert_file, "key_file": issued.key_file}
        return "[tls]\n" + "".join(f'{name} = "{file}"\n' for name, file in files.items())

    def start(self, failpoints: str = "", first_path: str = "") -> None:
        """first_path: a folder that its Python searches before the project's."""
        paths = [*filter(None, [first_path]), str(ROOT), str(ROOT / "protos")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        if failpoints:
            env["BAGUA_AGENT_FAILPOINTS"] = failpoints
        words = [sys.executable, "-m", "bagua_agent.service"]
        words += ["serve", "--plain-units", "--config", str(self.config)]
        self.process = self.host.run_agent(words, env, self.log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def stop(self) -> None:
        """SIGTERM; returns when it is gone, its units alone."""
        assert self.process is not None
        self.process.send(signal.SIGTERM)
        assert self.process.wait(STOP_DEADLINE_S) == 0, self.log.read_text()

    def workers(self) -> list[int]:
        """Process ids of the workers here."""
        here = [psutil.Process(pid) for pid in self.host.pids()]
        return [p.pid for p in here if "BAGUA_WORKER_ID" in p.environ()]

    def says(self, *words: str) -> bool:
        return any(all(w in line for w in words) for line in self.log.read_text().splitlines())

    def await_line(self, *words: str) -> None:
        eventually(
            lambda: self.says(*words),
            DEADLINE_S,
            lambda: f"{self.name} says {words}\n{self.log.read_text()}",
            POLL_S,
        )


class SubmittedJob:
    def __init__(self, cluster: Cluster, job_id: str, samples: int, epochs: int) -> None:
        self.cluster, self.job_id, self.samples, self.epochs = cluster, job_id, samples, epochs
        self.records = cluster.directory / job_id / "ledger"
        self.out = cluster.directory / job_id / "out"
        self._world_seen_at = 0
        self.out.mkdir(parents=True)

    @property
    def ledger(self) -> ledger.Ledger:
        return ledger.read(self.records)

    @property
    def nodes(self) -> list[str]:
        """That have orders for it."""
        return sorted(
            n for n, orders in self.cluster.orders().items() if any(o.job_id == self.job_id for o in orders)
        )

    def generations(self) -> list[Generation]:
        """By number, as etcd's history has them."""
        changes = self.cluster.etcd.history(JobKeys(self.job_id).generation)
        values = [change.value for change in changes if change.value is not None]
        return [Generation.from_proto(membership_pb2.Generation.FromString(value)) for value in values]

    def leaving(self) -> set[str]:
        """Nodes whose agents want to leave."""
        records, _ = self.cluster.store.get_prefix(JobKeys(self.job_id).agents)
        agents = [membership_pb2.Agent.FromString(record.value) for record in records]
        return {agent.node_name for agent in agents if agent.leaving}

    def await_world(self, size: int, after_step: int | None = None) -> int:
        """A committed step above `after_step` by `size` workers; the step.

        Without `after_step` it is one above the step of the last such wait.
        """
        above = self._world_seen_at if after_step is None else after_step

        def found() -> int:
            if not self.records.is_dir():
                return 0
            return next((x.step for x in self.ledger.lines if x.step > above and x.world_size == size), 0)

        self._world_seen_at = eventually(
            found, DEADLINE_S, lambda: f"{self.job_id}: a step by {size}\n{self.cluster.logs()}", POLL_S
        )
        return self._world_seen_at

    @property
    def step(self) -> int:
        lines = self.ledger.lines
        return lines[-1].step if lines else 0

    def hurry(self) -> None:
        (self.out / "hurry").touch()

    def await_outcome(self) -> cluster_requests.JobEnded:
        def found() -> cluster_requests.JobEnded | None:
            return cluster_requests.outcome_of(self.cluster.store, self.job_id)

        return eventually(found, DEADLINE_S, lambda: f"{self.job_id} ends\n{self.cluster.logs()}", POLL_S)

    def check(self) -> None:
        """Every sample once."""
        found = self.ledger
        problems = found.check(self.samples, self.epochs)
        assert problems == [], problems
        assert found.torn == 0


class Cluster:
    def __init__(
        self,
        lab: Lab,
        directory: Path,
        slots: int = 1,
        etcd_beside: bool = False,
        node_lease_s: float = 2.0,
        dashboard: str = "",
        otel_port: int = 0,
        authority: Path | None = None,
    ) -> None:
        """etcd on the lab's first host, a daemon on every other. etcd_beside: a daemon on every host, and a member of
        etcd on each of the first three. node_lease_s: how long the others miss a daemon that is frozen. dashboard:
        where daemons serve the page, and jobs their metrics at its address; empty: nowhere. otel_port: of the first
        host, to which jobs send metrics and events; 0: nowhere. authority: the folder of one that issues certificates
        to daemons; None: they have none."""
        self.lab = lab
        self.node_lease_s = node_lease_s
        self.dashboard = dashboard
        self.authority = authority
        self.otel = f"http://{lab.hosts[0].address}:{otel_port}" if otel_port else ""
        self.directory = directory
        nodes = lab.hosts if etcd_beside else lab.hosts[1:]
        self.etcd: EtcdCluster = lab.etcd(*(lab.hosts[:3] if etcd_beside else lab.hosts[:1]))
        self.daemons = [Daemon(self, host, slots) for host in nodes]
        self._forwards = [Forward(m.host, (m.host.address, m.port)) for m in self.etcd.members]
        self.store = Store(StoreConfig(tuple(parse_endpoint(f.endpoint) for f in self._forwards)))
        self.store.connect(10.0)

    def close(self) -> None:
        self.store.close()
        for forward in self._forwards:
            forward.close()
        print(self.logs())

    def logs(self) -> str:
        texts = []
        for path in sorted((*self.directory.rglob("daemon.log"), *self.directory.rglob("agent.log"))):
            try:
                text = path.read_text(errors="replace")
            except FileNotFoundError:
                continue  # its daemon has removed an ended unit's folder meanwhile
            texts.append(f"---- {path.relative_to(self.directory)}\n{text}")
        return "\n".join(texts)

    def daemon(self, name: str) -> Daemon:
        return next(d for d in self.daemons if d.name == name)

    def submit(
        self, job_id: str, nodes: tuple[int, int], *, slots: int = 0, priority: int = 0, samples: int = 1152,
        epochs: int = 2, sizes: tuple[int, ...] = (),
    ) -> SubmittedJob:  # fmt: skip
        job = SubmittedJob(self, job_id, samples, epochs)
        words = (
            "--out",
            str(job.out),
            "--samples",
            str(samples),
            "--epochs",
            str(epochs),
            "--step-s",
            str(STEP_S),
        )
        command = WorkerCommand(CommandKind.SCRIPT, str(SCRIPT), words)
        config = JobConfig(job_id, command, *nodes, ledger_dir=str(job.records))
        submission = pb.Submission(
            protocol=PROTOCOL,
            job_id=job_id,
            wanted=pb.Submission.RUN,
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            slots_per_node=slots,
            priority=priority,
            user="root",
            directory=str(self.directory),
            environment={"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "OMP_NUM_THREADS": "1"},
            launch=encode(config, SUBMITTED),
            size_policy=SizePolicy(sizes).record,
        )
        cluster_requests.submit(self.store, submission)
        return job

    def orders(self) -> dict[str, tuple[OrderView, ...]]:
        records, _ = self.store.get_prefix(cluster_keys.ORDERS)
        return {kv.key.removeprefix(cluster_keys.ORDERS): read_orders(kv.value) for kv in records}

    def nodes(self) -> dict[str, NodeView]:
        records, _ = self.store.get_prefix(cluster_keys.NODES)
        names = [(kv.key.removeprefix(cluster_keys.NODES), kv.value) for kv in records]
        return {name: read_node(value, name) for name, value in names}

    def submission(self, job_id: str) -> pb.Submission:
        found = self.store.get(cluster_keys.submission(job_id))
        assert found is not None
        return parse_submission(found.value, job_id)

    def scheduler(self) -> str:
        found = self.store.get(cluster_keys.SCHEDULER)
        return "" if found is None else pb.Scheduler.FromString(found.value).node_name

    def await_nodes(self, count: int) -> None:
        eventually(
            lambda: len(self.nodes()) == count, DEADLINE_S, lambda: f"{count} nodes\n{self.logs()}", POLL_S
        )

    def await_line(self, *words: str) -> None:
        """By any of the daemons."""
        eventually(
            lambda: any(d.says(*words) for d in self.daemons),
            DEADLINE_S,
            lambda: f"a node prints {words}\n{self.logs()}",
            POLL_S,
        )

    def await_idle(self) -> None:
        """No unit anywhere, and no process but daemons and etcd."""
        eventually(
            lambda: not any(u.alive for n in self.nodes().values() for u in n.units),
            DEADLINE_S,
            self.logs,
            POLL_S,
        )
        processes = [served.process for served in (*self.daemons, *self.etcd.members)]
        expected = {p.pid for p in processes if p is not None and p.is_running}
        for daemon in self.daemons:
            eventually(
                lambda d=daemon: set(d.host.pids()) <= expected,
                10,
                lambda d=daemon: f"{d.name}: {d.host.pids()}",  # type: ignore[misc]
                POLL_S,
            )
