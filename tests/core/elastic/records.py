"""Generation records for tests, from few words."""

from __future__ import annotations

from bagua_contract.records import Generation, GenerationKind, Placement


def generation(
    number: int,
    *worker_ids: str,
    kind: GenerationKind = GenerationKind.PLANNED,
    base: int | None = None,
    since: int | dict[str, int] = 1,
    store_address: str = "127.0.0.1:1",
) -> Generation:
    """Members in rank order, each on a node of its own. base: by default the number before. since: one for
    all, or by worker."""
    return Generation(
        number=number,
        base=number - 1 if base is None else base,
        kind=kind,
        members=tuple(
            Placement(
                worker_id=worker_id,
                agent_id=f"agent-{worker_id}",
                node_name=f"node-{worker_id}",
                slot=0,
                global_rank=r,
                node_rank=r,
                local_rank=0,
                store_address=store_address,
                since_generation=since if isinstance(since, int) else since.get(worker_id, number),
                join_revision=10 + r,
                holder=True,
            )
            for r, worker_id in enumerate(worker_ids)
        ),
        nonce="nonce",
        reason="a test",
    )


def loss(number: int, *worker_ids: str, base: int | None = None) -> Generation:
    return generation(number, *worker_ids, kind=GenerationKind.FAILOVER, base=base)
