"""Runs a container's command with a substitute for bagua-launch, and parses the command line that it gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bagua_agent.config.job_config import JobConfig
from tests.deploy.parsed import parsed
from tests.lab.wait import HANG_S

SUBSTITUTE = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], {{k: v for k, v in os.environ.items() if k.startswith(("PET_", "BAGUA_"))}}]))
"""


def launched(container: Mapping[str, Any], environment: Mapping[str, str], folder: Path) -> JobConfig:
    """environment: what Kubernetes and its controllers give the container, beside the values in the manifest."""
    substitute = folder / "bagua-launch"
    substitute.write_text(SUBSTITUTE)
    substitute.chmod(0o755)
    tini, dashes, *command = container["command"]
    assert (tini, dashes) == ("tini", "--")
    written = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    done = subprocess.run(
        [*command, *container["args"]],
        env={"PATH": f"{folder}:{os.environ['PATH']}", **written, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    words, variables = json.loads(done.stdout)
    return parsed(words, variables)
