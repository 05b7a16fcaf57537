"""The options of the commands that talk to a cluster: rows for the same table as `run`'s (options.py)."""

from __future__ import annotations

from dataclasses import replace

from bagua_launch.options import CREDENTIALS, ENDPOINT, ENDPOINTS_FORM, RUN_OPTIONS, SIZE, Option

CLUSTER = "Cluster"

ETCD = replace(
    ENDPOINT, name="etcd", group=CLUSTER, help=f"The cluster's etcd, {ENDPOINTS_FORM}", own=True,
    more_variables=("PET_RDZV_ENDPOINT",), other_names=("rdzv-endpoint",),
)  # fmt: skip
CLUSTER_OPTIONS = (ETCD, *CREDENTIALS)

_TAKEN_FROM_RUN = frozenset(
    {
        *(
            "nnodes",
            "sizes",
            "start_size",
            "cooldown",
            "replica_size",
            "module",
            "no_python",
            "run_path",
            "max_restarts",
            "shutdown_timeout",
            "hang_timeout",
        ),
        *("start_method", "numa_binding", "virtual_local_rank", "role", "rdzv_conf"),
        *("deterministic", "virtual_shards"),
        *(
            "autotune_level",
            "autotune_algorithms",
            "autotune_max_samples",
            "autotune_sampling_confidence_time",
        ),
        *("autotune_warmup_time", "is_output_autotune_log"),
        *("ledger", "digest_every", "checkpoint_dir", "checkpoint_every"),
    }
)

SUBMIT_OPTIONS = (
    Option("name", CLUSTER, "The job's id. Default: the script's name and a few letters.", "NAME", own=True),
    Option("priority", CLUSTER, "Jobs of a higher one go first. Default 0.", "N", own=True),
    Option("user", CLUSTER, "Account of the workers. Default: what each node is configured for.", "NAME", own=True),
    Option("label", CLUSTER, "Only nodes that have these.", "NAME=VALUE,...", own=True),
    Option(
        "env", CLUSTER, "Variables of the workers: with a value, or this terminal's own.", "NAME[=VALUE],...", own=True
    ),
    Option(
        "nproc-per-node", SIZE, "Workers on each node, one a slot: a number, or auto, as many as it has. Default auto.",
        "N|auto",
    ),
    Option("follow", CLUSTER, "Stay until the job ends, say how it goes, exit with its code.", short="-f", own=True),
    *(option for option in RUN_OPTIONS if option.key in _TAKEN_FROM_RUN),
    *CLUSTER_OPTIONS,
)  # fmt: skip

# The keys of launch.toml: each command reads its own, so one file serves all commands.
FILE_OPTIONS = (*RUN_OPTIONS, *SUBMIT_OPTIONS)
