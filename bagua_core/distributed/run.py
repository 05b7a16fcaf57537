"""Runs as `python -m bagua_core.distributed.run`: see bagua_launch/original_main.py."""

from __future__ import annotations

from bagua_core.distributed import replace_process

if __name__ == "__main__":
    replace_process("run")
