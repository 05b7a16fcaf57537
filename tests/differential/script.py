"""The training script that has the drawn features, written as a user writes one.

The same function runs in one plain process and on every worker of a job. `Stage` is all that the harness adds: calls at
the points where a history's events happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bagua_core as bagua
from bagua_core.elastic.step import runtime
from tests.differential.features import LATE_SCALE, PLAIN, Features
from tests.differential.models import INPUTS, Critic, Net, Samples, ShareBatchNorm
from tests.differential.optimizers import OPTIMIZERS
from tests.differential.shares import Shares

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Stage(Protocol):
    """number: 0 for the one whose initial parameters are the job's. shares: of a job's workers, for the one process
    that repeats what their layers do; None on workers."""

    number: int
    shares: Shares | None

    def reach(self, point: str, at: int) -> None:
        """point: "step" with the job's step, "part" within it, "evaluation" with the epoch."""


def job_step() -> int:
    """The job's own position: steps committed before the one under way, the same on every worker."""
    return runtime.engine().plan.step


@dataclass
class Run:
    """What the script leaves behind. samples: of each step, by the step's number, as this process drew them. bodies:
    how often the loop's body ran."""

    models: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    registered: dict[str, Any] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)
    bodies: int = 0

    def state(self) -> dict[str, Any]:
        objects = {"model": self.models, "optimizer": self.optimizers, "registered": self.registered}
        return {
            "steps": runtime.engine().state.name.step,
            **{f"{k} {n}": o.state_dict() for k, of_kind in objects.items() for n, o in of_kind.items()},
        }


class Counter:
    """A value of the script's own that is part of the job's state."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Script:
    def __init__(self, f: Features, stage: Stage) -> None:
        self.f, self.stage, self.run = f, stage, Run()
        dtype = DTYPES[f.dtype]
        bagua.init_process_group()
        # Every worker but one begins with other values: what they train on must be that one's.
        torch.manual_seed(f.seed if stage.number == 0 else 1_000_003 * stage.number + f.seed)
        self.data = Samples(f, dtype)
        self.net = Net(f, dtype)
        self.average = nn.Linear(INPUTS, self.net.first.out_features).to(dtype).requires_grad_(False)
        self.average.load_state_dict(self.net.first.state_dict())
        trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizers = []
        if f.head != PLAIN:
            head = list(self.net.last.parameters())
            trained = [p for p in trained if all(p is not other for other in head)]
            self.optimizers.append(OPTIMIZERS["master" if f.dtype == "bfloat16" else "nesterov"](head))
            self.run.optimizers["head"] = self.optimizers[0]
        self.optimizer = OPTIMIZERS[f.optimizer](trained)
        self.optimizers.append(self.optimizer)
        self.first_rate: float = self.optimizer.param_groups[0]["lr"]
        partial = f.unfreeze != PLAIN or f.branch != PLAIN
        self.model = bagua.DistributedDataParallel(
            self.net, optimizers=self.optimizers, find_unused_parameters=partial
        )
        self.run.models["net"], self.run.optimizers["net"] = self.net, self.optimizer
        if f.parts != PLAIN:
            self.critic = Critic(f, dtype)
            self.critic_optimizer = OPTIMIZERS[f.optimizer](self.critic.parameters())
            self.critic_model = bagua.DistributedDataParallel(self.critic, optimizers=[self.critic_optimizer])
            self.run.models["critic"], self.run.optimizers["critic"] = self.critic, self.critic_optimizer
        self.scheduler = self._scheduler()
        self.best = Counter()
        if self.scheduler is not None:
            self._register("scheduler", self.scheduler)
        if f.average == "registered":
            self._register("average", self.average)
        if f.evaluation != PLAIN:
            self._register("best", self.best)
        self.losses = Counter()
        if f.inside != PLAIN:
            self._register("losses", self.losses)
        self.scaler = None
        if f.scaler != PLAIN:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
            self._register("scaler", self.scaler)

    def _register(self, name: str, stateful: Any) -> None:
        self.run.registered[name] = stateful
        bagua.register_state(name, stateful)

    def _scheduler(self) -> Any:
        schedulers = torch.optim.lr_scheduler
        match self.f.schedule:
            case "step":
                return schedulers.CosineAnnealingLR(self.optimizer, 2 * self.f.steps)
            case "epoch":
                return schedulers.StepLR(self.optimizer, step_size=1, gamma=0.7)
            case "plateau":
                return schedulers.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0, threshold=0.9)
        return None

    # -- loops

    def train(self) -> Run:
        if self.f.loop == "next_step":
            self._loop_without_loader()
        else:
            self._loop_with_loader()
        return self.run

    def _loop_with_loader(self) -> None:
        f = self.f
        loader = bagua.ElasticDataLoader(
            self.data,
            global_batch_size=f.batch,
            seed=f.seed,
            num_workers=1 if f.loop == "loader_process" else 0,
            max_local_batch_size=2 if f.micro != PLAIN else None,
        )
        for epoch in loader.epochs(f.epochs):
            self._epoch_begins(epoch)
            for index, x, y in loader:
                step = job_step()
                self.stage.reach("step", step)
                self._step(step, epoch, index, x, y)
            self._epoch_ends(epoch)
        loader.close()

    def _loop_without_loader(self) -> None:
        f = self.f
        while (step := bagua.next_step()) < f.steps:
            epoch, batch = divmod(step, f.batches)
            if f.unfreeze != PLAIN:
                self._epoch_begins(epoch)
            order = torch.randperm(f.samples, generator=torch.Generator().manual_seed(f.seed + epoch))
            whole = order[batch * f.batch : (batch + 1) * f.batch]
            share = f.batch // bagua.get_world_size()
            index = whole[bagua.get_rank() * share :][:share]
            self.stage.reach("step", step)
            self._step(step, epoch, index, self.data.x[index], self.data.y[index])

    def _epoch_begins(self, epoch: int) -> None:
        if self.f.unfreeze != PLAIN:
            self.net.middle.requires_grad_(epoch >= 1)

    def _epoch_ends(self, epoch: int) -> None:
        """Between two steps of loops with a loader."""
        f = self.f
        loss = None
        if f.norm == "batch":
            # each worker's statistics are of its own shares: all go on with rank 0's, as they do in training
            for norm in self._share_norms():
                for buffer in norm.buffers():
                    self._share(buffer)
        if f.evaluation != PLAIN:
            self.stage.reach("evaluation", epoch)
            self.model.eval()
            with torch.no_grad():
                # All of the data on every worker, so that the mean is the same whichever worker is lost meanwhile.
                own = F.mse_loss(self.net(self.data.x), self.data.y).double()
            loss = bagua.allreduce(own, bagua.ReduceOp.AVG).item()
            self.model.train()
            self.best.value = max(self.best.value, loss) if epoch else loss
        if f.schedule == "epoch":
            self.scheduler.step()
        elif f.schedule == "plateau":
            self.scheduler.step(loss)

    @staticmethod
    def _share(buffer: torch.Tensor) -> None:
        """From rank 0; from the next one that has this rank if it is lost meanwhile, as PeerLostError asks."""
        while True:
            try:
                bagua.broadcast_inplace(buffer)
            except bagua.PeerLostError:
                continue
            return

    # -- one draw

    def _step(self, step: int, epoch: int, index: Tensor, x: Tensor, y: Tensor) -> None:
        f = self.f
        self.run.bodies += 1
        self.run.samples.setdefault(step, []).extend(index.tolist())
        if f.rate != PLAIN:
            for group in self.optimizer.param_groups:
                group["lr"] = self.first_rate * 2 / (2 + step)
        if f.update == "late" and step:
            for p in self._trained():
                if p.grad is not None:
                    p.grad.div_(LATE_SCALE)
            self._update(step)
        if step % f.accumulation == 0:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        mask = self._mask(step, epoch, index)

        def computed() -> Tensor:
            out: Tensor = self.model(x, mask, f.branch != PLAIN and step % 2 == 1)
            return out

        if f.has_closure:
            self._closed_step(step, computed, y)
        else:
            self._backward(step, computed, y)
        if step % f.accumulation == f.accumulation - 1 and f.update != "late":
            self._update(step)
        ends_epoch = f.loop == "next_step" and (step + 1) % f.batches == 0
        if f.schedule == "step" or (f.schedule == "epoch" and ends_epoch):
            self.scheduler.step()

    def _backward(self, step: int, computed: Callable[[], Tensor], y: Tensor) -> None:
        f, out = self.f, computed()
        if f.parts == "gan":
            self._critic_part(out, y)
            self.stage.reach("part", step)
        loss = F.mse_loss(out, y) / f.accumulation
        if f.parts == "gan":
            loss = loss + F.softplus(-self.critic_model(out)).mean() / f.accumulation
        if self.scaler is not None:
            scaled = self.scaler.scale(loss)
            (scaled * float("inf") if step % 5 == 3 else scaled).backward()
        elif f.parts == "shared":
            self.critic_optimizer.zero_grad()
            loss.backward(retain_graph=True)
            F.mse_loss(self.critic_model(out).squeeze(1), y[:, 0]).backward()
            self.critic_optimizer.step()
        else:
            (loss * LATE_SCALE if f.update == "late" else loss).backward()
        if f.sharpness != PLAIN:
            self._sharp_part(step, computed, y)
        if f.inside == "before":
            self._sum_inside(loss)
        self.loss = loss.detach()

    def _closed_step(self, step: int, computed: Callable[[], Tensor], y: Tensor) -> None:
        """LBFGS."""
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 3:
                self.stage.reach("part", step)
            self.optimizer.zero_grad()
            loss = F.mse_loss(computed(), y)
            loss.backward()
            if self.f.inside == "before":
                self._sum_inside(loss)
            self.loss = loss.detach()
            return loss

        self.optimizer.step(closure)

    def _sharp_part(self, step: int, computed: Callable[[], Tensor], y: Tensor) -> None:
        """SAM: gradients at the place to which those of the first backward lead."""
        moved = [(p, p.detach().clone()) for p in self._trained() if p.grad is not None]
        norm = float(torch.stack([p.grad.norm() for p, _ in moved]).norm()) if moved else 0.0
        with torch.no_grad():
            for p, _ in moved if 0 < norm < float("inf") else ():
                p.add_(p.grad, alpha=0.05 / norm)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.stage.reach("part", step)
        loss = F.mse_loss(computed(), y)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        for p, before in moved:
            p.data = before

    def _sum_inside(self, loss: Tensor) -> None:
        """The sum over the job of what a batch's losses give, each weighted by its worker's share."""
        weighted = loss.detach().double() * runtime.engine().micro_batch.weight
        if not weighted.isfinite():
            weighted = torch.zeros_like(weighted)  # of a worker without a share
        self.losses.value += bagua.allreduce(weighted, bagua.ReduceOp.SUM).item()

    def _share_norms(self) -> list[ShareBatchNorm]:
        found = [m for model in self.run.models.values() for m in model.modules()]
        return [m for m in found if isinstance(m, ShareBatchNorm)]

    def _mask(self, step: int, epoch: int, index: Tensor) -> Tensor | None:
        """Also tells the batch normalization of the one process which rows are whose."""
        shares = self.stage.shares
        if shares is None:
            return self.data.mask(epoch, index)
        for norm in self._share_norms():
            norm.rows = shares.rows(step, index)
        if self.f.dropout == "layer":
            return shares.dropout(step, index, self.data.x.dtype)
        return self.data.mask(epoch, index)

    def _critic_part(self, out: Tensor, y: Tensor) -> None:
        self.critic_optimizer.zero_grad()
        real = F.softplus(-self.critic_model(y)).mean()
        if self.f.norm == "batch":
            # one backward for each forward: a second one overwrites buffers that the first one's graph has
            real.backward()
            F.softplus(self.critic_model(out.detach())).mean().backward()
        else:
            (real + F.softplus(self.critic_model(out.detach())).mean()).backward()
        self.critic_optimizer.step()

    def _update(self, step: int) -> None:
        f = self.f
        if f.clip != PLAIN:
            for optimizer in self.optimizers if self.scaler is not None else ():
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self._trained(), 0.3)
        for optimizer in () if f.has_closure else self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        with torch.no_grad():
            for p in self._trained():
                if f.after_step == "clamp":
                    p.clamp_(-0.35, 0.35)
                elif f.after_step == "shrink":
                    p.mul_(0.97)
            if f.average == "registered":
                for kept, p in zip(self.average.parameters(), self.net.first.parameters(), strict=True):
                    kept.mul_(0.9).add_(p, alpha=0.1)
        if f.average in ("buffers", "parameters"):
            self.net.update_average()
        if f.inside == "behind":
            self.stage.reach("part", step)
            self._sum_inside(self.loss)

    def _trained(self) -> Iterator[nn.Parameter]:
        return (p for p in self.net.parameters() if p.requires_grad)
