"""The processors that a worker may use, on invented machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.start import numa_topology
from bagua_agent.workers.start.numa_binding import Processor, Topology, processors_of_slot
from bagua_agent.workers.start.numa_topology import cpu_list, read_topology
from bagua_agent.workers.start.spawn import spawn_worker
from tests.agent.workers.worker_lab import Workers


def machine(
    nodes: int, cores: int, *, threads: int = 1, nodes_a_socket: int = 1, cores_a_cache: int = 8
) -> tuple[Processor, ...]:
    """Linux's usual numbering: first one thread of every core, then the other threads."""
    total = nodes * cores
    return tuple(
        Processor(
            cpu=thread * total + core,
            numa_node=core // cores,
            socket=core // cores // nodes_a_socket,
            core=core,
            cache=core // cores_a_cache * cores_a_cache,
        )
        for thread in range(threads)
        for core in range(total)
    )


TWO_SOCKETS = machine(2, 8, threads=2, cores_a_cache=4)
FOUR_NODES = machine(4, 4, nodes_a_socket=2, cores_a_cache=2)


@pytest.mark.parametrize(
    ("binding", "slot", "slots", "processors", "gpus", "expected"),
    [
        ("node", 0, 2, TWO_SOCKETS, (1, 0), "8-15,24-31"),
        ("node", 1, 2, TWO_SOCKETS, (1, 0), "0-7,16-23"),
        ("node", 1, 2, TWO_SOCKETS, (), "8-15,24-31"),
        ("node", 1, 4, TWO_SOCKETS, (), "0-7,16-23"),
        ("node", 2, 4, TWO_SOCKETS, (0, 1), "8-15,24-31"),  # fewer GPUs than workers: by slot
        ("socket", 0, 1, FOUR_NODES, (2,), "8-15"),
        ("socket", 0, 4, FOUR_NODES, (), "0-7"),
        ("exclusive", 0, 2, TWO_SOCKETS, (0, 0), "0-3,16-19"),
        ("exclusive", 1, 2, TWO_SOCKETS, (0, 0), "4-7,20-23"),
        ("exclusive", 0, 3, TWO_SOCKETS, (0, 0, 0), "0-2,16-18"),
        ("exclusive", 2, 3, TWO_SOCKETS, (0, 0, 0), "6-7,22-23"),
        ("exclusive", 0, 1, TWO_SOCKETS, (0, 0), "0-3,16-19"),  # shared with GPUs that no worker has
        ("core-complex", 0, 2, TWO_SOCKETS, (1, 1), "8-11,24-27"),
        ("core-complex", 1, 2, TWO_SOCKETS, (1, 1), "12-15,28-31"),
        ("core-complex", 2, 3, TWO_SOCKETS, (1, 1, 1), "8-11,24-27"),
        ("core-complex", 0, 1, TWO_SOCKETS[1:], (0,), "4-7,20-23"),  # the fullest cache first
    ],
)
def test_processors_of_slot(
    binding: str,
    slot: int,
    slots: int,
    processors: tuple[Processor, ...],
    gpus: tuple[int, ...],
    expected: str,
) -> None:
    assert processors_of_slot(binding, slot, slots, Topology(processors, gpus)) == cpu_list(expected)


def test_exclusive_shares_nothing_and_leaves_nothing() -> None:
    for slots in range(1, 9):
        shares = [processors_of_slot("exclusive", s, slots, Topology(TWO_SOCKETS)) for s in range(slots)]
        assert len(frozenset().union(*shares)) == sum(len(share) for share in shares)


@pytest.mark.parametrize(
    ("binding", "topology", "words"),
    [
        ("exclusive", Topology(machine(1, 2), (0, 0, 0)), "2 cores for 3 devices"),
        ("node", Topology(TWO_SOCKETS, (0, 5, 0)), "NUMA node 5"),
        ("node", Topology(()), "does not say"),
        ("numa", Topology(TWO_SOCKETS), "not node, socket"),
    ],
)
def test_what_cannot_be_divided_is_one_clear_error(binding: str, topology: Topology, words: str) -> None:
    with pytest.raises(UserError, match=words):
        processors_of_slot(binding, 1, 3, topology)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def sys_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one processor that this process may use, whose GPUs the tests add; there is no nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    cpu = min(os.sched_getaffinity(0))
    made = tmp_path / "sys"
    write(made / "devices/system/node/node3/cpulist", f"{cpu}")
    processor = made / f"devices/system/cpu/cpu{cpu}"
    write(processor / "topology/thread_siblings_list", f"{cpu},{cpu + 64}")
    write(processor / "topology/physical_package_id", "1")
    for index, (kind, level) in enumerate([("Data", 1), ("Instruction", 4), ("Unified", 3)]):
        write(processor / f"cache/index{index}/type", kind)
        write(processor / f"cache/index{index}/level", str(level))
        write(processor / f"cache/index{index}/shared_cpu_list", f"{cpu}-{cpu + level}")
    return made


def add_pci_devices(sys_dir: Path, *devices: tuple[str, str, str, str]) -> None:
    for address, vendor, kind, node in devices:
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", node)):
            write(sys_dir / "bus/pci/devices" / address / name, text)


def test_the_topology_is_read_from_sys(sys_dir: Path) -> None:
    add_pci_devices(
        sys_dir,
        ("0000:0a:00.0", "0x10de", "0x030200", "3"),
        ("0000:02:00.0", "0x10de", "0x030000", "-1"),
        ("0000:0b:00.0", "0x10de", "0x040300", "3"),
        ("0000:01:00.0", "0x8086", "0x030000", "0"),
    )
    cpu = min(os.sched_getaffinity(0))
    topology = read_topology({}, sys_dir=sys_dir)
    assert topology == Topology((Processor(cpu, 3, 1, cpu, cpu),), (0, 3))
    assert read_topology({"CUDA_VISIBLE_DEVICES": "1"}, sys_dir=sys_dir).gpu_numa_nodes == (3,)
    with pytest.raises(UserError, match="GPU-abc"):
        read_topology({"CUDA_VISIBLE_DEVICES": "GPU-abc"}, sys_dir=sys_dir)


def put_nvidia_smi(sys_dir: Path, script: str) -> None:
    program = sys_dir.parent / "programs/nvidia-smi"
    write(program, f"#!/bin/sh\n{script}")
    program.chmod(0o755)


@pytest.fixture
def pod_of_two(sys_dir: Path) -> Path:
    """The last two GPUs of a host of four, as a container or a step of Slurm has them: /sys lists all."""
    nodes = ("0", "0", "3", "4")
    add_pci_devices(
        sys_dir, *((f"0000:{bus}a:00.0", "0x10de", "0x030200", node) for bus, node in enumerate(nodes, 1))
    )
    lines = ("GPU-2b10-77, 00000000:3A:00.0", "GPU-2c11-78, 00000000:4A:00.0")
    put_nvidia_smi(sys_dir, "\n".join(f'echo "{line}"' for line in lines))
    return sys_dir


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, (3, 4)), ("0,1", (3, 4)), ("1", (4,)), ("GPU-2c11-78,GPU-2b", (4, 3)), ("", ())],
)
def test_workers_are_bound_by_the_gpus_that_they_have_and_not_by_the_hosts(
    pod_of_two: Path, visible: str | None, expected: tuple[int, ...]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert read_topology(environ, sys_dir=pod_of_two).gpu_numa_nodes == expected


@pytest.mark.parametrize("visible", ["2", "GPU-2", "GPU-3", "MIG-2b10-77", "-1"])
def test_gpus_that_are_not_there_or_not_one_are_named(pod_of_two: Path, visible: str) -> None:
    with pytest.raises(UserError, match=f"CUDA_VISIBLE_DEVICES={visible} does not name"):
        read_topology({"CUDA_VISIBLE_DEVICES": visible}, sys_dir=pod_of_two)


def test_a_driver_that_fails_leaves_what_sys_lists(pod_of_two: Path) -> None:
    put_nvidia_smi(pod_of_two, "echo 'No devices were found'; exit 6")
    assert read_topology({}, sys_dir=pod_of_two).gpu_numa_nodes == (0, 0, 3, 4)


@pytest.mark.parametrize(
    "line", ["GPU-2b10-77, 00000000:5A:00.0", "GPU-2b10-77", "GPU-2b10-77, , x", "GPU-2b, ?"]
)
def test_what_sys_does_not_have_or_what_is_no_address_leaves_what_sys_lists(
    pod_of_two: Path, line: str
) -> None:
    """In WSL2 the driver of the host serves GPUs that are no PCI devices of Linux."""
    put_nvidia_smi(pod_of_two, f"echo 'GPU-2b10-77, 00000000:3A:00.0'; echo '{line}'")
    assert read_topology({}, sys_dir=pod_of_two).gpu_numa_nodes == (0, 0, 3, 4)


def test_a_driver_that_does_not_answer_is_one_clear_error(
    pod_of_two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa_topology, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    put_nvidia_smi(pod_of_two, "exec /bin/sleep 1000")
    with pytest.raises(UserError, match="does not answer; leave the flag out"):
        read_topology({}, sys_dir=pod_of_two)


def test_a_machine_that_does_not_tell_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave the flag out"):
        read_topology({}, sys_dir=tmp_path)


def test_a_spawned_worker_is_bound_and_the_agent_is_not(workers: Workers) -> None:
    before = os.sched_getaffinity(0)
    workers.script("import os\nprint(sorted(os.sched_getaffinity(0)))\n")
    command = WorkerCommand(CommandKind.SCRIPT, "script.py")
    for cpu in sorted(before)[:2]:
        worker = spawn_worker(
            command,
            dict(os.environ),
            worker_id="bound",
            slot=0,
            directory=workers.directory,
            gated=False,
            preimport=(),
            cpus=frozenset({cpu}),
        )
        workers.started.append(worker)
        assert workers.to_end(worker).stdout == f"[{cpu}]\n"
    assert os.sched_getaffinity(0) == before
