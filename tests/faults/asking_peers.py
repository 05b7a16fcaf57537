"""The script of test_script_collectives.py: asks the others for everything there is, and at times one dies of it.

At the end of each short epoch with all three workers rank 0 says which scenario is next, "<collective> <victim's rank>
<before or after>", and its victim kills itself right before it calls or right after it returned. Every survivor writes
<out>/records/<worker id>: one JSON line a scenario. In steps collectives run too; whatever they should never give
goes to <out>/wrong.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("scenarios", nargs="+")
args = parser.parse_args()
WORKER, WORLD = os.environ["BAGUA_WORKER_ID"], 3
torch.set_num_threads(1)
(args.out / "records").mkdir(exist_ok=True)


def wrong(*what):
    with (args.out / "wrong").open("a") as file:
        print(WORKER, *what, file=file)


def ask(name, rank, size, root, group=None):
    """The result as plain values."""
    own = torch.tensor([rank])
    match name:
        case "allreduce":
            return bagua.allreduce(own, group=group).tolist()
        case "reduce":
            result = bagua.reduce(own, root, group=group)
        case "broadcast":
            return bagua.broadcast(own, root, group).tolist()
        case "broadcast_object":
            return bagua.broadcast_object({"rank": rank, "more": torch.arange(3)}, root, group)["rank"]
        case "allgather":
            return bagua.allgather(own, group).tolist()
        case "gather":
            result = bagua.gather(own, root, group)
        case "scatter":
            result = bagua.scatter(own, torch.arange(size).view(-1, 1) if rank == root else None, root, group)
        case "reduce_scatter":
            return bagua.reduce_scatter(torch.arange(size) + rank, group=group).tolist()
        case "alltoall":
            return bagua.alltoall(torch.arange(size) + 10 * rank, group).tolist()
        case "alltoall_v":
            rows, splits = bagua.alltoall_v(torch.full((size * rank,), rank), [rank] * size, group)
            return [rows.tolist(), splits]
        case "message":  # to the root from each of the others
            if rank != root:
                bagua.send(own, root, group=group)
                return None
            return [bagua.recv(own, peer, group=group).tolist() for peer in range(size) if peer != root]
    return None if result is None else result.tolist()


def in_the_step(group):
    """Every entry is its rank's, or zero of one that still copies the state; or this rank's own, if the step fails."""
    rank, size = bagua.get_rank(), bagua.get_world_size()
    whole = bagua.allgather(torch.tensor(rank + 1)).tolist()
    if any(x not in (0, r + 1) for r, x in enumerate(whole)) and whole != [rank + 1] * size:
        wrong("allgather", whole)
    rows = bagua.allgather_rows(torch.full((rank,), rank)).tolist()
    ordered = sorted(rows) == rows and all(rows.count(r) in (0, r) for r in range(size))
    if not ordered and rows != [rank] * rank * size:
        wrong("allgather_rows", rows)
    sent = bagua.alltoall(torch.full((size,), rank + 1)).tolist()
    if any(x not in (0, r + 1) for r, x in enumerate(sent)) and sent != [rank + 1] * size:
        wrong("alltoall", sent)
    if group.rank is not None:
        total = bagua.allreduce(torch.tensor(1.0), group=group).item()
        if not 1.0 <= total <= group.size:
            wrong("a group's allreduce", total)


def next_scenario():
    done = {int(path.name) for path in args.out.glob("struck/*")}
    return next((i for i in range(len(args.scenarios)) if i not in done), None)


def strike(number):
    (args.out / "struck").mkdir(exist_ok=True)
    (args.out / "struck" / str(number)).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def play(number, everyone):
    """everyone: a group, made before the victim can be gone."""
    words = args.scenarios[number].split()
    name, victim, moment = words[0].removeprefix("group-"), int(words[1]), words[2]
    root = 1
    rank = bagua.get_rank()
    group = everyone if words[0].startswith("group-") else None
    is_victim = rank == victim
    if is_victim and moment == "before":
        strike(number)
    record = {"scenario": number, "rank": rank}
    try:
        record["result"] = ask(name, rank, WORLD, root, group)
    except bagua.PeerLostError as error:
        record["lost"] = error.ranks
    except bagua.MembersChanged:
        record["changed"] = True
    if is_victim:
        strike(number)
    # the survivors are still of one mind
    record["left"] = bagua.allreduce(torch.ones(1)).item()
    with (args.out / "records" / WORKER).open("a") as file:
        print(json.dumps(record), file=file)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), float(index % 2)


bagua.init_process_group()
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(Samples(), global_batch_size=6, seed=1)
made_in, group = -1, None
for _ in loader.epochs(100_000):
    for x, y in loader:
        if bagua.generation() != made_in:
            made_in, group = (
                bagua.generation(),
                bagua.new_group([0, bagua.get_world_size() - 1][: bagua.get_world_size()]),
            )
        optimizer.zero_grad()
        in_the_step(group)
        nn.functional.mse_loss(model(x).squeeze(1), y).backward()
        optimizer.step()
        time.sleep(0.01)
    if bagua.get_world_size() == WORLD:
        everyone = bagua.new_group(list(range(WORLD)))
        scenario = bagua.broadcast_object(next_scenario() if bagua.get_rank() == 0 else -1)
        if scenario == -1:
            continue  # a joiner without a step in this epoch has no peers yet
        if scenario is None:
            break
        play(scenario, everyone)
(args.out / "ends").mkdir(exist_ok=True)
(args.out / "ends" / f"{WORKER}.json").write_text(json.dumps(net.weight.tolist()))
loader.close()
