"""The command line as it is typed: default command, flags, variables, file, the script's arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.service.main import cli as agent_cli
from bagua_agent.workers.exits.exit_cause import FAULT_SIGNALS
from bagua_contract.distribution import own_version
from bagua_launch.cluster_options import ETCD, FILE_OPTIONS
from bagua_launch.command_line import whole_flags
from bagua_launch.config_file import read_config_file
from bagua_launch.errors import ETCD_MISSING
from bagua_launch.option_suggestions import OF_OTHER_LAUNCHERS, nearest
from bagua_launch.options import RUN_OPTIONS
from bagua_launch.precedence import merge
from tests.lab.wait import HANG_S
from tests.launch.launcher import Launcher, LaunchProcess, asked_of
from tests.launch.torchrun_options import SWITCHES, WITH_VALUE


def torchrun_flags() -> dict[str, bool]:
    """Every long option of the torchrun that is installed, and whether it takes a value."""
    actions = get_args_parser()._actions
    return {
        max((s for s in action.option_strings if "_" not in s), key=len): action.nargs != 0
        for action in actions
        if action.option_strings and action.dest != "help"
    }


def test_run_is_the_default_command(launch: Launcher) -> None:
    for words in (["run"], []):
        config = launch.config(*words, "--nnodes", "2:8", "train.py", "--lr", "1")
        assert (config.min_nodes, config.max_nodes) == (2, 8)
        assert (config.command.target, config.command.args) == ("train.py", ("--lr", "1"))


def test_everything_after_the_script_is_the_scripts(launch: Launcher) -> None:
    args = ("--nnodes", "9", "-m", "--", "--help", "run", "-t", "--a_b=c", "")
    config = launch.config("--nnodes=2", "train.py", *args)
    assert config.command.args == args
    assert config.max_nodes == 2


def test_a_double_dash_ends_our_own_options(launch: Launcher) -> None:
    (launch.directory / "--odd.py").write_text("")
    assert launch.config("--nnodes", "1", "--", "--odd.py", "-x").command.target == "--odd.py"


def test_underscores_and_dashes_are_alike(launch: Launcher) -> None:
    for words in (["--nproc_per_node", "3"], ["--nproc_per_node=3"], ["--nproc-per-node=3"]):
        assert launch.config(*words).slots == 3
    launch.script.rename(launch.directory / "train_it.py")
    config = launch.config("train_it.py", "--a_b")
    assert (config.command.target, config.command.args) == ("train_it.py", ("--a_b",))


def test_short_flags(launch: Launcher) -> None:
    (launch.directory / "pkg").mkdir()
    (launch.directory / "pkg" / "__init__.py").write_text("")
    result = launch("-r", "3", "-t", "1", "-m", "pkg.train", "x")
    assert result.exit_code == 7, result.output


def test_the_installed_torchrun_has_no_flag_that_is_not_listed() -> None:
    listed = {**dict.fromkeys(WITH_VALUE, True), **dict.fromkeys(SWITCHES, False)}
    flags = torchrun_flags()
    assert len(flags) >= 29 and flags.items() <= listed.items(), "a newer torchrun: add its flags"


def test_every_flag_of_torchrun_is_taken_with_its_variable() -> None:
    options = {option.flag: option for option in RUN_OPTIONS if not option.own}
    assert {f for f, option in options.items() if not option.is_switch} == WITH_VALUE
    assert {f for f, option in options.items() if option.is_switch} == SWITCHES
    for flag, option in options.items():
        assert option.variables[0] == "PET_" + flag[2:].replace("-", "_").upper()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_printed(launch: Launcher, shell: str) -> None:
    result = launch("--print-completion", shell)
    assert result.exit_code == 0, result.output
    assert f"_BAGUA_LAUNCH_COMPLETE={shell}_complete" in result.output


def test_a_shell_without_completion_is_refused(launch: Launcher) -> None:
    assert "--print-completion 'tcsh': no completion" in launch.refusal("--print-completion", "tcsh")


# A value, whatever it looks like
@pytest.mark.parametrize(
    ("words", "whole"),
    [
        (["--redirect=3", "train.py"], ["--redirects=3", "train.py"]),
        (
            ["--redirect", "3", "--nproc", "2", "train.py"],
            ["--redirects", "3", "--nproc-per-node", "2", "train.py"],
        ),
        (["--master_a", "h", "-r", "3", "t.py"], ["--master-addr", "h", "-r", "3", "t.py"]),
        (
            ["--role", "--redirect", "t.py"],
            ["--role", "--redirect", "t.py"],
        ),
        (["--standalone", "--redirect=1"], ["--standalone", "--redirects=1"]),
        (["--rdzv=x", "t.py"], ["--rdzv=x", "t.py"]),  # of several
        (["--ledg=x", "t.py"], ["--ledg=x", "t.py"]),  # ours
        (["t.py", "--redirect=3"], ["t.py", "--redirect=3"]),  # the script's
        (["--", "--redirect=3"], ["--", "--redirect=3"]),
        (["-m", "--redirect=3", "pkg.mod"], ["-m", "--redirects=3", "pkg.mod"]),
    ],
)
def test_abbreviations_that_argparse_takes_for_torchrun(words: list[str], whole: list[str]) -> None:
    assert whole_flags(words, RUN_OPTIONS) == whole


def test_an_abbreviation_reaches_the_agent_and_the_scripts_own_stay(launch: Launcher) -> None:
    config = launch.config("--redirect=3", "--max-restart", "4", "train.py", "--redirect=1")
    assert (config.redirects, config.max_restarts, config.command.args) == ("3", 4, ("--redirect=1",))


def test_flag_over_variable_over_file_over_default(launch: Launcher) -> None:
    assert launch.config().max_restarts == 0
    config_file = launch.directory / "launch.toml"
    config_file.write_text("max-restarts = 1\n")
    env = {"BAGUA_CONFIG": str(config_file)}
    assert launch.config(env=env).max_restarts == 1
    env["PET_MAX_RESTARTS"] = "2"
    assert launch.config(env=env).max_restarts == 2
    assert launch.config("--max-restarts", "3", env=env).max_restarts == 3


def test_variables(launch: Launcher) -> None:
    config = launch.config(
        env={
            "PET_NNODES": "2:4",
            "PET_NPROC_PER_NODE": "2",
            "PET_RDZV_ID": "demo",
            "PET_ROLE": "",  # an empty one says nothing
            "PET_VIRTUAL_LOCAL_RANK": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9",
            "BAGUA_ETCD": "e1:1",
            "BAGUA_LEDGER": "books",
            "BAGUA_DIGEST_EVERY": "5",
        }
    )
    assert (config.min_nodes, config.max_nodes, config.slots, config.job_id) == (2, 4, 2, "demo")
    assert (config.role, config.virtual_local_rank, config.shutdown_timeout_s) == ("default", True, 9.0)
    assert (config.endpoints, config.ledger_dir, config.digest_every_steps) == (("e1:1",), "books", 5)
    both = {"BAGUA_ETCD": "e1:1", "PET_RDZV_ENDPOINT": "e2:2"}
    assert launch.config(env=both).endpoints == ("e2:2",)


def test_the_file_at_its_usual_place_in_its_usual_forms(launch: Launcher) -> None:
    path = launch.directory / ".config" / "bagua" / "launch.toml"
    path.parent.mkdir(parents=True)
    path.write_text(
        'nnodes = "2:4"\nrdzv_endpoint = ["e1:1", "e2:2"]\nrdzv-id = "demo"\nvirtual-local-rank = true\n'
        "[rdzv-conf]\njoin_timeout = 5\nholder_timeout = 2.5\n"
    )
    config = launch.config()
    assert (config.max_nodes, config.endpoints, config.virtual_local_rank) == (4, ("e1:1", "e2:2"), True)
    assert (config.join_timeout_s, config.holder_timeout_s) == (5.0, 2.5)


def test_one_file_for_all_commands(launch: Launcher) -> None:
    """What only the cluster's commands know is nothing to a job in the foreground."""
    config_file = launch.directory / "launch.toml"
    config_file.write_text('priority = 3\nlabel = "rack=r1"\nmax-restarts = 1\n')
    config = launch.config(env={"BAGUA_CONFIG": str(config_file)})
    assert config.max_restarts == 1 and config.endpoints is None


@pytest.mark.parametrize(
    ("content", "of_a_start", "of_the_others"),
    [
        ('etcd = "e1:1"', "e1:1", "e1:1"),
        ('rdzv_endpoint = "e2:2"', "e2:2", "e2:2"),
        ('etcd = "e1:1"\nrdzv-endpoint = "e2:2"', "e2:2", "e1:1"),  # each command's own spelling is stronger
    ],
)
def test_a_line_of_the_file_may_have_any_spelling_of_an_option(
    launch: Launcher, content: str, of_a_start: str, of_the_others: str
) -> None:
    config_file = launch.directory / "launch.toml"
    config_file.write_text(content)
    environ = {"BAGUA_CONFIG": str(config_file)}
    assert launch.config(env=environ).endpoints == (of_a_start,)
    assert merge((ETCD,), {}, {}, read_config_file(environ, FILE_OPTIONS))["etcd"].text == of_the_others


def test_a_typed_master_address_is_stronger_than_the_clusters_etcd(launch: Launcher) -> None:
    config_file = launch.directory / "launch.toml"
    config_file.write_text('etcd = "https://e1:1"\netcd-user = "ann"\netcd-password-file = "p"\n')
    of_file = {"BAGUA_CONFIG": str(config_file)}
    typed = ("--nnodes", "2", "--rdzv-id", "a", "--master-addr", "10.0.0.1")
    for env, where in ((of_file, f"{config_file}: etcd"), ({"BAGUA_ETCD": "https://e1:1"}, "BAGUA_ETCD")):
        done = launch(*typed, "--rdzv-backend", "c10d", "train.py", env=env)
        assert f"{where} is ignored: --master-addr is where the agents meet" in done.stderr
        config = launch.config(*typed, "--rdzv-backend", "c10d", env=env)
        assert config.endpoints == ("10.0.0.1:29501",) and config.store_credentials == StoreCredentials()
        assert launch.config(*typed, env=env).endpoints == ("10.0.0.1:29501",)


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (("--nnodes", "2", "--rdzv-endpoint", "e1:1"), {}),
        (("--nnodes", "2", "--rdzv-backend", "etcd"), {"BAGUA_ETCD": "e1:1"}),
        (("--nnodes", "2"), {"PET_RDZV_ENDPOINT": "e1:1"}),  # as under torchrun
        ((), {"BAGUA_ETCD": "e1:1"}),  # one node: the address is the workers'
    ],
)
def test_elsewhere_the_endpoint_is_where_the_agents_meet(
    launch: Launcher, words: tuple[str, ...], env: dict[str, str]
) -> None:
    config = launch.config(*words, "--rdzv-id", "a", "--master-addr", "10.0.0.1", env=env)
    assert (config.endpoints, config.master_addr) == (("e1:1",), "10.0.0.1")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('nnode = "2"', "'nnode': no such option; use nnodes"),
        ("workers = 2", "'workers': no such option; use nproc-per-node"),
        ("nnodes = ", 'Invalid value (at end of document); use TOML such as nnodes = "2:8"'),
        ('nnodes = "3:2"', "nnodes '3:2': the least is more than the most; use MIN:MAX such as 2:3"),
        ("workers = 1979-05-27", "'workers': no such option; use nproc-per-node"),
        ("nnodes = 2020-01-01", "nnodes '2020-01-01': not text, number, list or table; use a string"),
    ],
)
def test_mistakes_in_the_file(launch: Launcher, content: str, line: str) -> None:
    path = launch.directory / "c.toml"
    path.write_text(content)
    refusal = launch.refusal("train.py", env={"BAGUA_CONFIG": str(path)})
    assert refusal == f"{path}: {line}"


def test_a_file_that_is_named_must_be_there(launch: Launcher) -> None:
    assert launch.refusal("train.py", env={"BAGUA_CONFIG": "nowhere.toml"}) == (
        "BAGUA_CONFIG 'nowhere.toml': No such file or directory; use a readable TOML file"
    )


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--proc", ["--nproc-per-node"]),
        ("--nprocs", ["--nproc-per-node"]),
        ("--procs", ["--nproc-per-node"]),
        ("--num-proc", ["--nproc-per-node"]),
        ("--workers", ["--nproc-per-node"]),
        ("--gpus", ["--nproc-per-node"]),
        ("--ncores", ["--nproc-per-node"]),
        ("-n", ["--nproc-per-node"]),  # of -np too
        ("--nodes", ["--nnodes"]),
        ("--nndoes", ["--nnodes"]),
        ("--dir", ["--checkpoint-dir", "--log-dir"]),
        ("--log-directory", ["--log-dir"]),
        ("--num-restarts", ["--max-restarts"]),
        ("--master-address", ["--master-addr"]),
        ("--autotune", ["--autotune-algorithms", "--autotune-level", "--autotune-max-samples"]),
        ("--no-such", []),
        ("--verbose", []),
        ("-z", []),
    ],
)
def test_what_a_mistyped_option_may_mean(word: str, meant: list[str]) -> None:
    assert nearest(word, [flag for option in RUN_OPTIONS for flag in option.flags]) == meant


def test_another_launchers_word_is_an_option_of_ours_and_suggested_only_where_the_command_has_it() -> None:
    ours = {option.flag for option in RUN_OPTIONS}
    assert set(OF_OTHER_LAUNCHERS.values()) <= ours and not OF_OTHER_LAUNCHERS.keys() & ours
    assert nearest("--workers", ["--etcd", "--follow"]) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--proc", "2", "train.py"], "--proc: no such option; use --nproc-per-node"),
        (["-np", "2", "train.py"], "-n: no such option; use --nproc-per-node"),
        (["--nnodez", "2", "train.py"], "--nnodez: no such option; use --nnodes"),
        (["--nproc_per_knot", "2", "train.py"], "--nproc-per-knot: no such option; use --nproc-per-node"),
        (["--checkpoint", "d", "train.py"],
         "--checkpoint: no such option; use --checkpoint-dir or --checkpoint-every"),
        (["events", "--etc", "127.0.0.1:1", "x"],
         "--etc: no such option; use --etcd or --etcd-ca or --etcd-cert"),
        (["logs", "--follw", "x"], "--follw: no such option; use --follow"),
        (["events", "x", "--plt"], "--plt: no such option; use --plot"),
        (["scale", "--jsn", "x", "2"], "--jsn: no such option; use --json"),
        (["--hlep"], "--hlep: no such option; use --help"),
        (["--failpoint=x"], "--failpoint: no such option; use --help to see them all"),  # hidden
        (["--zzz", "train.py"], "--zzz: no such option; use --help to see them all"),
        (["-z", "train.py"], "-z: no such option; use --help to see them all"),
        (["--nnodes"], "Option '--nnodes' requires an argument; use --help to see how"),
        ([], "no script; use bagua-launch [OPTIONS] SCRIPT [ARGUMENTS], or --help"),
        (["run"], "no script; use bagua-launch [OPTIONS] SCRIPT [ARGUMENTS], or --help"),
        (["--nnodes", "3:2", "train.py"],
         "--nnodes '3:2': the least is more than the most; use MIN:MAX such as 2:3"),
        (["--nnodes", "2\n3", "train.py"],
         "--nnodes '2\\n3': not a number of nodes; use N, or MIN:MAX such as 2:8"),
        (["--no-python", "no-such-program"],
         "'no-such-program': no such program; use a path, or a name found on PATH"),
        (["-m", "no_such_module.x"],
         "--module 'no_such_module.x': no module 'no_such_module'; use one that python can import here"),
        (["--etcd-ca", "nowhere", "train.py"],
         "--etcd-ca 'nowhere': No such file or directory; use a readable file"),
        (["scale", "2"], f"scale: {ETCD_MISSING}"),
        (["status", "demo"],
         "--etcd is missing; use --etcd HOST:PORT, or set BAGUA_ETCD. No command reaches a job that shows `store "
         "private`: start it with --nnodes 1:2 on a private network, which shows the store, or with --dashboard for a "
         "page"),
        (["trace", "demo"], ETCD_MISSING),
        (["scale"], "Missing argument '[JOB] NODES'; use --help to see how"),
        (["scale", "--rdzv-idd", "x", "2"], "--rdzv-idd: no such option; use --rdzv-id"),
        (["submit", "--sizes", "2,4", "train.py"],
         "--sizes '2,4': the job has 1 node and no other number; use --nnodes 2:4 with it"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(launch: Launcher, words: list[str], line: str) -> None:
    assert launch.refusal(*words) == line


def test_a_mistake_in_a_variable_names_the_variable(launch: Launcher) -> None:
    assert launch.refusal("train.py", env={"PET_NNODES": "x"}).startswith("PET_NNODES 'x': ")


def test_a_script_that_is_not_there(launch: Launcher) -> None:
    place = f"no such script in {launch.directory}"
    assert launch.refusal("trian.py") == f"'trian.py': {place}; use 'train.py'"
    assert launch.refusal("zzz") == (
        f"'zzz': {place}; use the path of an existing script, or --module, or --no-python"
    )
    assert launch.refusal("--rdzv-id", "a", "scal", "2") == (
        f"'scal': {place}; use bagua-launch scale ... with the command first, or an existing script"
    )
    assert launch.refusal("train") == f"'train': {place}; use 'train.py'"
    assert launch.refusal("--dashboard", "8080", "train.py") == (
        f"'8080': {place}; use the path of an existing script, or --dashboard=8080 for a page at this port"
    )


def test_a_missing_file_is_no_mistyped_command(launch: Launcher) -> None:
    launch.script.unlink()
    for name in ("train.py", "runs/train.py", "submit.sh"):
        assert launch.refusal(name).endswith(
            "use the path of an existing script, or --module, or --no-python"
        )


def test_a_file_as_a_module_is_refused(launch: Launcher) -> None:
    assert (
        launch.refusal("-m", "train.py") == "--module 'train.py': a file; use 'train', or leave --module out"
    )


def test_a_script_that_is_no_file(launch: Launcher) -> None:
    os.mkfifo(launch.directory / "fifo.py")
    assert launch.refusal("fifo.py") == "'fifo.py': a FIFO; use an ordinary file"
    assert launch.refusal("/dev/zero") == "'/dev/zero': a character device; use an ordinary file"


@pytest.mark.parametrize("first", [(), ("submit", "--etcd", "127.0.0.1:1"), ("--hosts", "a,b")])
def test_what_no_program_can_be_given_is_refused_here(launch: Launcher, first: tuple[str, ...]) -> None:
    assert launch.refusal(*first, "train.py", "a", "x" * 1_000_000) == (
        "argument 2 has 1000000 bytes, more than the 131071 that Linux passes in one; put it in a file"
    )


def test_help_shows_every_option_but_the_hidden_in_groups(launch: Launcher) -> None:
    for words in (["--help"], ["-h"], ["run", "--help"]):
        result = launch(*words)
        assert result.exit_code == 0
        shown = [o.flag for o in RUN_OPTIONS if re.search(f"{o.flag}[ ,]", result.output)]
        assert shown == [option.flag for option in RUN_OPTIONS if option.name != "failpoints"]
        assert "\nRendezvous:\n" in result.output and "_" not in "".join(shown)
    whole = launch("--help").output
    assert "scale" in whole
    assert re.findall(r"^  (-h|--version)", whole, re.MULTILINE) == ["-h", "--version"]


def test_help_names_the_signals_that_count_as_failures_of_the_script() -> None:
    [text] = [option.help for option in RUN_OPTIONS if option.flag == "--max-restarts"]
    assert set(re.findall(r"SIG[A-Z]+", text)) == {number.name for number in FAULT_SIGNALS}


def test_version(launch: Launcher) -> None:
    result = launch("--version")
    assert result.exit_code == 0 and result.output.startswith("bagua-launch ")


def test_notes_go_to_stderr(launch: Launcher) -> None:
    result = launch("--logs-specs", "default", "--monitor-interval", "1", "train.py")
    assert (result.exit_code, result.stdout) == (7, "")
    assert result.stderr == (
        "bagua-launch: note: accepted for compatibility, ignored: --logs-specs, --monitor-interval\n"
    )


def test_as_a_process(launch_process: LaunchProcess) -> None:
    done = launch_process("--nproc_per_node=2", "train.py", "--nnodes", "x", agent=True, PET_NNODES="1:3")
    assert asked_of(done) == {
        "id": asked_of(done)["id"], "nodes": [1, 3], "slots": 2, "kind": "script", "target": "train.py",
        "args": ["--nnodes", "x"], "endpoints": None, "restarts": 0,
    }  # fmt: skip


def test_a_mistake_as_a_process(launch_process: LaunchProcess) -> None:
    done = launch_process("--nnodes", "3:2", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "bagua-launch: --nnodes '3:2': the least is more than the most; use MIN:MAX such as 2:3\n"
    )


def test_nothing_heavy_is_imported_before_the_agent(launch_process: LaunchProcess) -> None:
    done = launch_process("--help", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "bagua_launch.job_request" in imported
    heavy = {"torch", "grpc", "etcd3", "google.protobuf", "numpy", "asyncio", "psutil"}
    assert imported & heavy == set()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["bagua-launch", "st"], ["plain,status", "plain,stop", "file,st"]),
        (["bagua-launch", "submit", "--prio"], ["plain,--priority"]),
        (["bagua-launch", "--nno"], ["plain,--nnodes"]),
    ],
)
def test_a_shell_completes_commands_and_options(words: list[str], completed: list[str]) -> None:
    root = Path(__file__).parents[2]
    environ = {
        **os.environ,
        "PYTHONPATH": f"{root}:{root / 'protos'}",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
        "_BAGUA_LAUNCH_COMPLETE": "bash_complete",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from bagua_launch.main import main; main()"],
        env=environ, cwd=root, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert set(completed) <= set(done.stdout.splitlines()), done.stdout + done.stderr


@pytest.mark.parametrize("flag", ["--etcd", "--rdzv-endpoint", "--rdzv_endpoint"])
@pytest.mark.parametrize(
    "words", [("run", "train.py"), ("submit", "train.py"), ("scale", "x", "2"), ("status",), ("list",), ("ps",),
              ("nodes",), ("events", "x"), ("logs", "x"), ("stop", "x"), ("delete", "x"), ("drain", "n"),
              ("undrain", "n"), ("top", "x"), ("trace", "x"), ("tune", "x"), ("collectives", "x"), ("dashboard",)],
    ids=lambda words: words[0],
)  # fmt: skip
def test_an_etcd_is_named_alike_on_every_command(launch: Launcher, words: tuple[str, ...], flag: str) -> None:
    line = launch.refusal(words[0], flag, "a:b:c:d", *words[1:])
    assert line.startswith(("--etcd: ", "--rdzv-endpoint: ")), line


def test_both_commands_print_their_version(launch: Launcher) -> None:
    for name, said in (
        ("bagua-agent", CliRunner().invoke(agent_cli, ["--version"]).stdout),
        ("bagua-launch", launch("--version").stdout),
    ):
        assert said == f"{name} {own_version() or '(not installed: running from its sources)'}\n"
