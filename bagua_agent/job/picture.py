"""Makes the picture of a job that its metrics show, in the loop's thread."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from bagua_agent.job.store_outage import StoreOutage
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.metrics.job_picture import JobPicture, WorkerPicture
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.worker_lifecycle import WorkerLifecycle

if TYPE_CHECKING:
    from bagua_agent.autotune.study_records import Study

NO_WORKERS: Mapping[int, WorkerPicture] = MappingProxyType({})


def worker_picture(
    job: JoinedJob, workers: NodeWorkers, lifecycle: WorkerLifecycle, worker_id: str
) -> WorkerPicture | None:
    """Returns the picture of a worker of this node; None if it has ended."""
    worker = workers.get(worker_id)
    if worker is None:
        return None
    generation = job.seen.generation
    placement = None if generation is None else generation.placement_of(worker_id)
    sharded = None if job.seen.replica_size == 1 else placement
    return WorkerPicture(
        worker.slot,
        worker.process.pid,
        None if placement is None else placement.global_rank,
        lifecycle.progress_of(worker_id),
        None if sharded is None else sharded.replica_rank,
        None if sharded is None else sharded.shard_rank,
        worker_id,
    )


def picture_of(
    job: JoinedJob,
    workers: NodeWorkers,
    lifecycle: WorkerLifecycle,
    outage: StoreOutage,
    exits: Mapping[tuple[int, str], int],
    *,
    leads: bool,
    now_s: float,
    study: Study | None = None,
    ended: Mapping[int, WorkerPicture] = NO_WORKERS,
) -> JobPicture:
    """Returns the picture of the job as this agent sees it. exits: of workers here so far, by slot and how they
    ended. ended: the last picture of workers that have exited, by slot, for slots without a worker."""
    seen = job.seen
    generation, desired = seen.generation, seen.view.wanted
    pictures = (worker_picture(job, workers, lifecycle, worker_id) for worker_id in workers.worker_ids)
    shown = [picture for picture in pictures if picture is not None]
    taken = {picture.slot for picture in shown}
    shown += [picture for slot, picture in ended.items() if slot not in taken]
    return JobPicture(
        job_id=job.keys.job_id,
        node_name=job.node_name,
        leads=leads,
        generation=0 if generation is None else generation.number,
        world_size=0 if generation is None else generation.world_size,
        nodes=0 if generation is None else generation.node_count,
        wanted=(0, 0) if desired is None else (desired.min_nodes, desired.max_nodes),
        workers=tuple(shown),
        generations=dict(seen.generations),
        exits=dict(exits),
        store_answers=outage.connected,
        store_outages=outage.count,
        store_away_s=outage.total_s(now_s),
        trials=0 if study is None else len(study.trials),
        best_steps_per_s=0.0 if study is None or study.best is None else study.best.rate,
        trials_lost_s=0.0 if study is None else study.lost_s,
        replica_size=seen.replica_size,
        present_nodes=len(seen.view.agents) if leads else None,
        restarts=seen.restarts,
    )
