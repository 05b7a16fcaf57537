"""The worker's place in the job, as Lightning asks for it: the ranks of the generation in force.

Before the worker has joined the job they are the launcher's, which the trainer needs while it is constructed.
"""

from __future__ import annotations

import os

from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import bagua_core as bagua


class BaguaEnvironment(ClusterEnvironment):
    def __init__(self) -> None:
        self._has_joined = False

    def join(self) -> None:
        """Joins the job; ranks are the job's from now on."""
        bagua.init_process_group()
        self._has_joined = True
        self.ranks_changed()

    def ranks_changed(self) -> None:
        """Updates Lightning's rank in both places; it decides whether this worker logs and writes checkpoints."""
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @staticmethod
    def detect() -> bool:
        return bagua.is_launched()

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    def world_size(self) -> int:
        return bagua.get_world_size() if self._has_joined else int(os.environ.get("WORLD_SIZE", "1"))

    def global_rank(self) -> int:
        return bagua.get_rank() if self._has_joined else int(os.environ.get("RANK", "0"))

    def local_rank(self) -> int:
        return bagua.get_local_rank()

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", "0"))

    def set_world_size(self, size: int) -> None:
        """Does nothing, for the job decides on its size."""

    def set_global_rank(self, rank: int) -> None:
        """Does nothing, for the job decides on ranks."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accepts all settings: any number of workers can train a script, whatever `devices` says."""
