"""Command lines of the original's three launchers: what bagua-launch is called with, and what is said of the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_launch.autotune_request import parse_autotune
from bagua_launch.errors import RequestError
from bagua_launch.original_flags import HINTS, NO_EFFECT, Original, Translation, translate
from bagua_launch.written_values import WrittenValue
from tests.lab import zygote
from tests.lab.wait import HANG_S
from tests.launch.launcher import Launcher

ROOT = Path(__file__).parents[2]
LAUNCH, RUN, BAGUARUN = Original.LAUNCH, Original.RUN, Original.BAGUARUN


def made(kind: Original, line: str, **environ: str) -> Translation:
    return translate(kind, line.split(), environ)


def test_a_fixed_number_of_nodes_is_torchruns_static_rendezvous() -> None:
    line = "--nnodes=2 --node_rank 1 --master_addr=10.0.0.1 --master_port=1234 --nproc_per_node=8"
    line += " train.py --lr 1 --nnodes 3"
    translation = made(LAUNCH, line)
    assert translation.arguments == (
        *("--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=1234"),
        *("--nproc-per-node=8", "train.py", "--lr", "1", "--nnodes", "3"),
    )
    assert not translation.notes and not translation.environment


def test_what_has_a_meaning_gets_it() -> None:
    translation = made(LAUNCH, "--logdir logs --default_bucket_size=1024 -m --nproc_per_node 2 pkg.train")
    assert translation.arguments == (
        *("--module", "--nproc-per-node=2", "--log-dir", "logs", "--redirects", "3", "pkg.train"),
    )
    assert translation.environment == {"BAGUA_DEFAULT_BUCKET_SIZE": "1024"}


@pytest.mark.parametrize("flag", sorted(NO_EFFECT))
def test_what_has_none_is_said_once(flag: str) -> None:
    word = "--" + flag[2:].replace("-", "_")
    switches = ("report", "enable", "is-output", "use-env", "bagua-net")
    value = "" if any(flag[2:].startswith(s) for s in switches) else "1"
    translation = made(LAUNCH, f"{word} {value} --nproc_per_node 2 train.py")
    assert translation.arguments == ("--nproc-per-node=2", "train.py")
    assert translation.notes == (f"{word}: {NO_EFFECT[flag]}",)


def test_autotuning_is_bagua_launchs_from_level_1_on() -> None:
    tuned = "--autotune_max_samples 9 --autotune_warmup_time=3 --is_output_autotune_log"
    assert made(LAUNCH, f"--autotune_level 0 {tuned} train.py").arguments == ("train.py",)
    translation = made(LAUNCH, f"--autotune_level 1 {tuned} train.py")
    assert translation.arguments == (
        *("--autotune-level=1", "--autotune-max-samples=9", "--autotune-warmup-time=3"),
        *("--is-output-autotune-log", "train.py"),
    )
    assert translation.notes == ()


def test_baguarun_takes_them_too() -> None:
    line = "--host_list h1,h2 --nproc_per_node 1 --autotune_level 1 --autotune_max_samples 9 train.py"
    arguments = made(BAGUARUN, line).arguments
    assert arguments[-1] == "train.py"
    assert {"--autotune-level=1", "--autotune-max-samples=9"} <= set(arguments)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--autotune_level 3", "--autotune-level '3'"),
        ("--autotune_level 1 --autotune_max_samples 0", "--autotune-max-samples '0': a study needs a trial"),
        ("--autotune_level 1 --autotune_sampling_confidence_time 0", "a trial needs time"),
        ("--autotune_level 1 --autotune_warmup_time soon", "--autotune-warmup-time 'soon'"),
    ],
)
def test_an_autotune_flag_that_cannot_be_followed_is_refused_in_one_line(words: str, line: str) -> None:
    flags = [word for word in made(LAUNCH, f"{words} train.py").arguments if word.startswith("--")]
    said = {
        name[2:].replace("-", "_"): WrittenValue(value, name)
        for name, _, value in (word.partition("=") for word in flags)
    }
    with pytest.raises(RequestError) as error:
        parse_autotune(said)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_an_argument_for_the_local_rank_is_refused() -> None:
    with pytest.raises(RequestError, match=r"--set_additional_flag: .*LOCAL_RANK"):
        made(LAUNCH, "--set_additional_flag train.py")


def test_runs_flags_are_torchruns_and_it_survives_three_failures() -> None:
    line = "--nnodes 1:4 --rdzv_backend=c10d --rdzv_endpoint h:29500 --rdzv_id a --autotune_level=1 --tee 3 train.py"
    assert made(RUN, line).arguments == (
        *("--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=h:29500", "--rdzv-id=a", "--tee=3"),
        *("--autotune-level=1", "--max-restarts", "3", "train.py"),
    )
    assert made(RUN, "--max_restarts 0 train.py").arguments == ("--max-restarts=0", "train.py")
    assert made(RUN, "--standalone --nproc_per_n 2 train.py").arguments[:2] == (
        "--standalone",
        "--nproc-per-node=2",
    )


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("--checkpoint_dir d t.py", ("--checkpoint-dir=d", "--max-restarts", "3", "t.py")),
        ("--etcd h:2379 t.py --once", ("--rdzv-endpoint=h:2379", "--max-restarts", "3", "t.py", "--once")),
        ("--once t.py", ("--once", "--max-restarts", "3", "t.py")),
        ("--dashboard t.py", ("--dashboard=yes", "--max-restarts", "3", "t.py")),
    ],
)
def test_options_of_bagua_launch_keep_their_values(line: str, arguments: tuple[str, ...]) -> None:
    assert made(RUN, line).arguments == arguments


def test_runs_number_of_restarts_is_only_a_default() -> None:
    assert made(RUN, "t.py", PET_MAX_RESTARTS="100").arguments == ("t.py",)
    assert made(RUN, "t.py", PET_MAX_RESTARTS="").arguments == ("--max-restarts", "3", "t.py")
    assert translate(RUN, ["t.py"], {}, {"max_restarts"}).arguments == ("t.py",)


def test_what_no_launcher_has_is_left_to_bagua_launch() -> None:
    assert made(LAUNCH, "--nonsense=3 train.py").arguments == ("--nonsense=3", "train.py")
    assert made(LAUNCH, "--nproc_per_node 1 -- --odd.py -x").arguments[1:] == ("--", "--odd.py", "-x")
    with pytest.raises(RequestError, match="--logdir needs a value; use --logdir DIR"):
        made(LAUNCH, "--logdir")


# -- several hosts


def test_hosts_over_ssh() -> None:
    translation = made(
        BAGUARUN, "--host_list h1,h2 --ssh_port 2222 --nproc_per_node 8 --no_python train.sh a"
    )
    assert translation.arguments == (
        *("--nproc-per-node=8", "--no-python", "--hosts", "h1,h2"),
        *("--ssh", "ssh -o BatchMode=yes -p 2222", "train.sh", "a"),
    )


def test_the_usual_port_needs_no_option() -> None:
    for line in ("--host_list h1:22,h2:22", "--host_list h1,h2 --ssh_port 22", "--host_list h1,h2"):
        assert made(BAGUARUN, f"{line} --nproc_per_node 1 t.py").arguments == (
            *("--nproc-per-node=1", "--hosts", "h1,h2", "t.py"),
        )


def test_hosts_and_port_come_from_variables_too() -> None:
    environ = {"BAGUA_NODE_DOMAIN_NAMES": "h1,h2", "BAGUA_SSH_PORT": "5022"}
    arguments = made(BAGUARUN, "--nproc_per_node=2 t.py", **environ).arguments
    assert arguments[1:5] == ("--hosts", "h1,h2", "--ssh", "ssh -o BatchMode=yes -p 5022")


def test_variables_travel() -> None:
    line = "--host_list h --nproc_per_node 1 -x NCCL_DEBUG -x PATHS=a,b=c t.py"
    translation = made(BAGUARUN, line, PATH="/bin", NCCL_DEBUG="INFO")
    assert translation.arguments[-3:] == ("--env", "PATH,NCCL_DEBUG,PATHS", "t.py")
    assert translation.environment == {"PATHS": "a,b=c"}


def test_what_baguarun_does_not_need_is_said() -> None:
    line = (
        "--host_list h --nproc_per_node 1 --bagua_service_port 29501 --enable_bagua_net --master_port 1 t.py"
    )
    translation = made(BAGUARUN, line)
    assert "--master-port" not in " ".join(translation.arguments)
    assert "--enable-bagua-net" in translation.arguments
    assert [note.partition(":")[0] for note in translation.notes] == ["--bagua_service_port"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nproc_per_node 1 t.py", "no hosts are given; use --host_list HOST,HOST"),
        ("--host_list h t.py", "--nproc_per_node is missing"),
        ("--host_list h1:22,h2:23 --nproc_per_node 1 t.py", r"SSH ports differ \(22, 23\)"),
        ("--host_list h --ssh_port x --nproc_per_node 1 t.py", "--ssh_port 'x' is no port"),
    ],
)
def test_mistakes(line: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        made(BAGUARUN, line)


# -- the real commands


@pytest.mark.parametrize("flag", sorted(HINTS))
def test_bagua_launch_names_what_to_use_instead(launch: Launcher, flag: str) -> None:
    word = "--" + flag[2:].replace("-", "_") if flag.startswith("--") else flag
    told = launch.refusal(word, "train.py")
    assert "no such option here; " in told and told.endswith(HINTS[flag])


def start(directory: Path, *words: str, path: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_"))}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "HOME": str(directory), **more}
    environment["PATH"] = path + environment["PATH"]
    line = [sys.executable, *words]
    if words[0] == "-m" and zygote.can_start(line, {"OMP_NUM_THREADS": "1", **environment}):
        return zygote.run_captured(line, environment, directory, "", 120)
    return subprocess.run(
        line,
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


SCRIPT = """
import bagua_core.torch_api as bagua
bagua.init_process_group()
bagua.barrier()
print("rank", bagua.get_rank(), "of", bagua.get_world_size(), "buckets", bagua.env.get_default_bucket_size())
"""


@pytest.mark.parametrize("name", ["launch", "run"])
def test_the_modules_start_a_job(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--nproc_per_node=2", "--report_metrics", "--default_bucket_size", "4096", "train.py")
    ended = start(tmp_path, "-m", f"bagua_core.distributed.{name}", *words)
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 of 2 buckets 4096" in ended.stdout and "rank 1 of 2 buckets 4096" in ended.stdout
    assert "note: --report_metrics: " in ended.stderr
    assert f"bagua_core.distributed.{name} is: BAGUA_DEFAULT_BUCKET_SIZE=4096 bagua-launch" in ended.stderr


def test_logs_go_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--nproc_per_node=1", "--logdir", "logs", "train.py")
    ended = start(tmp_path, "-m", "bagua_core.distributed.launch", *words)
    assert ended.returncode == 0, ended.stderr
    assert "rank 0" not in ended.stdout
    assert any("rank 0 of 1" in file.read_text() for file in (tmp_path / "logs").rglob("*") if file.is_file())


def test_baguarun_starts_a_job_over_ssh(tmp_path: Path) -> None:
    """ssh is replaced by a program that runs the command here, as tests/system does with a real one."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@" > "$HOME/asked"\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT + "import os; print('word', os.environ['WORD'])\n")
    call = "from bagua_launch.original_main import baguarun; baguarun()"
    words = ("--host_list", "127.0.0.1", "--ssh_port", "2222", "--nproc_per_node", "2", "-x", "WORD=a,b")
    # -x PYTHONPATH: the package is not installed for the interpreter of this test
    words = (*words, "-x", "PYTHONPATH", "train.py")
    ended = start(tmp_path, "-c", call, *words, path=f"{tmp_path / 'bin'}:")
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 of 2" in ended.stdout and "rank 1 of 2" in ended.stdout and "word a,b" in ended.stdout
    assert (tmp_path / "asked").read_text().startswith("-o BatchMode=yes -p 2222 127.0.0.1 ")


def test_run_reads_the_number_of_restarts_from_the_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "launch.toml").write_text("max_restarts = 7")
    (tmp_path / "train.py").write_text(
        "import os; print('may restart', os.environ['TORCHELASTIC_MAX_RESTARTS'])"
    )
    ended = start(
        tmp_path, "-m", "bagua_core.distributed.run", "train.py", BAGUA_CONFIG=str(tmp_path / "launch.toml")
    )
    assert ended.returncode == 0 and "may restart 7" in ended.stdout, ended.stderr


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    ended = start(tmp_path, "-m", "bagua_core.distributed.launch", "--set_additional_flag", "t.py")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "--set_additional_flag: scripts get no --local_rank" in ended.stderr
