"""The source distribution and the wheel hold everything, and a wheel in an empty environment runs a job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.docs.printed import printed_text
from tests.packaging.tracked_copy import copy_tracked

ROOT = Path(__file__).resolve().parents[2]
BUILD_S, INSTALL_S, JOB_S = 300, 1200, 120

SCRIPT = """
import torch
import bagua_core as bagua

bagua.init_process_group()
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(
    net, optimizers=[optimizer], algorithm="bytegrad"
)
data = [(torch.tensor([float(i), 1.0]), torch.tensor([float(i)])) for i in range(16)]
loader = bagua.ElasticDataLoader(data, global_batch_size=4, seed=0)
for epoch in loader.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x / 16), y / 16).backward()
        optimizer.step()
print("trained by", bagua.get_world_size(), "workers from", bagua.__file__)
"""


def run(
    *words: str | Path,
    timeout_s: float,
    cwd: Path | None = None,
    path: Path | None = None,
    home: Path | None = None,
) -> str:
    """Standard output; fails with all output unless it exits with 0. path: in front of PATH."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "BAGUA_", "PET_"))}
    if path is not None:
        clean["PATH"] = f"{path}:{clean['PATH']}"
    if home is not None:
        clean["HOME"] = str(home)
    done = subprocess.run(
        [*map(str, words)], capture_output=True, text=True, timeout=timeout_s, cwd=cwd, env=clean, check=False
    )
    assert done.returncode == 0, f"{words} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it. Only files that git tracks, or would, take part."""
    home = tmp_path_factory.mktemp("built")
    copy_tracked(home / "source")
    build = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", build, home, timeout_s=BUILD_S, cwd=home / "source")
    [source] = home.glob("bagua_elastic-*.tar.gz")
    pip_wheel = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    )
    run(*pip_wheel, "-w", home, source, timeout_s=BUILD_S)
    [wheel] = home.glob("bagua_elastic-*.whl")
    return source, wheel


def tracked(pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}


def test_the_wheel_holds_all_code_and_the_sources_in_c(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    for package in ("bagua_launch", "bagua_agent", "bagua_core", "bagua_torchrun"):
        assert tracked(f"{package}/**/*.py") <= names
        assert f"{package}/py.typed" in names  # or type checkers ignore its annotations
    assert "lightning_bagua.py" in names
    sources = {name for ending in ("c", "h", "cu") for name in tracked(f"bagua_core/kernels/*.{ending}")}
    plugin = tracked("bagua_core/net/plugin/*.cc") | tracked("bagua_core/net/plugin/*.h")
    assert sources and plugin and sources | plugin <= names
    assert {name.removeprefix("protos/") for name in tracked("protos/bagua_contract/*")} - names <= {
        "bagua_contract/__pycache__"
    }
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/"))}
    licences = {name.partition(".dist-info/licenses/")[2] for name in names}
    assert {"LICENSE", "bagua_agent/dashboard/static/uPlot.LICENSE"} <= licences
    if shutil.which("cc"):
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        assert f"bagua_core/kernels/_cpu{suffix}" in names


def test_the_source_distribution_holds_what_the_build_reads(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names
    assert tracked("bagua_core/kernels/*.[ch]") <= names
    assert tracked("bagua_core/net/plugin/*") <= names


@pytest.mark.parametrize("brings_its_own", [False, pytest.param(True, marks=pytest.mark.long)])
def test_jobs_of_two_workers_run_from_the_wheel(
    built: tuple[Path, Path], tmp_path: Path, brings_its_own: bool
) -> None:
    """brings_its_own: pip installs what it needs; else that is taken from the environment of the tests."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q")
    if brings_its_own:
        run(*pip, "-c", ROOT / "tests" / "constraints.txt", built[1], timeout_s=INSTALL_S)
    else:
        run(*pip, "--no-deps", "--no-index", built[1], timeout_s=INSTALL_S)
        packages = run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", timeout_s=60
        ).strip()
        # A path that a .pth file adds is no site directory, so the checkout's own editable installation stays out.
        (Path(packages) / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')  # the command, on this machine
    ssh.chmod(0o755)
    jobs = [
        (home / "bin" / "bagua-launch", "--nproc-per-node", "2"),
        (home / "bin" / "baguarun", "--host_list", "127.0.0.1", "--nproc_per_node", "2"),
    ]
    for module in ("bagua_core.distributed.launch", "bagua_core.distributed.run"):
        if brings_its_own:
            jobs.append((python, "-m", module, "--nproc_per_node=2"))
        else:  # its job is the first one's
            assert "--nproc-per-node" in run(python, "-m", module, "--help", timeout_s=JOB_S, cwd=tmp_path)
    for words in jobs:
        said = run(*words, script, timeout_s=JOB_S, cwd=tmp_path, path=tmp_path)
        assert f"trained by 2 workers from {home}" in said, (words, said)


@pytest.mark.long
def test_the_printed_installation_brings_what_a_job_needs(tmp_path: Path) -> None:
    """In a home and a clone of its own, with this machine's addresses for the repository and for torch."""
    index = os.environ.get("BAGUA_TORCH_INDEX") or os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
    given = {"<this repository>": f"file://{ROOT}", "https://download.pytorch.org/whl/cpu": index}
    block = printed_text("README.md", "git clone", given)
    run("sh", "-e", "-c", block, timeout_s=INSTALL_S, cwd=tmp_path, home=tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    programs = tmp_path / "bagua-venv" / "bin"
    said = run(
        programs / "bagua-launch",
        "--nproc-per-node",
        "2",
        script,
        timeout_s=JOB_S,
        cwd=tmp_path,
        home=tmp_path,
    )
    assert f"trained by 2 workers from {tmp_path / 'bagua-venv'}" in said
