"""Streaming DiLoCo in one process, as the paper writes it: torch's own optimizer is the outer one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bagua_core.algorithms import StreamingDiLoCo
from bagua_core.algorithms.streaming_diloco import COMPRESSIONS
from bagua_core.communication.compressed.compression import WithFeedback
from bagua_core.communication.compressed.compressor import with_feedback
from bagua_core.communication.weights.fragment_schedule import cut
from tests.core.algorithms.weight_workers import Replica, Shares, Worker


@dataclass
class Flight:
    sent: int
    mean: torch.Tensor
    samples: list[float]
    errors: list[torch.Tensor]


class Fragment:
    """Of parameters with these indices, one after the other. began: samples of each replica at the round's begin.
    errors: of each replica, what it has not sent."""

    def __init__(
        self, indices: Sequence[int], weights: torch.Tensor, outer: tuple[float, float], count: int
    ) -> None:
        self.indices = indices
        self.anchor = torch.nn.Parameter(weights)
        self.outer = torch.optim.SGD([self.anchor], outer[0], outer[1], nesterov=True)
        self.began = [0.0] * count
        self.errors = [torch.zeros_like(weights) for _ in range(count)]
        self.flight: Flight | None = None

    def of(self, replica: Replica) -> torch.Tensor:
        parameters = list(replica.inner.parameters())
        return torch.cat([parameters[i].detach().reshape(-1) for i in self.indices])

    def put(self, replica: Replica, flat: torch.Tensor) -> None:
        parameters = [list(replica.inner.parameters())[i] for i in self.indices]
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.data.copy_(part.view(parameter.shape))


class PlainDiLoCo:
    def __init__(self, replicas: list[Replica], algorithm: StreamingDiLoCo, first: int = 0) -> None:
        """first: the step in which all replicas are alike."""
        self.replicas = replicas
        self.algorithm = algorithm
        parameters = list(replicas[0].inner.parameters())
        parts = cut([p.numel() * p.element_size() for p in parameters], algorithm.fragments)
        outer = (algorithm.outer.lr, algorithm.outer.momentum)
        self.fragments = [
            Fragment(
                indices,
                torch.cat([parameters[i].detach().reshape(-1) for i in indices]),
                outer,
                len(replicas),
            )
            for indices in parts
        ]
        self.clocks = [first] * len(parts)
        self.samples = [0.0] * len(replicas)
        compressor = COMPRESSIONS[algorithm.compress]
        self.form = None if compressor is None else with_feedback(compressor)

    def exchange(self, step: int) -> None:
        every, count = self.algorithm.sync_every, len(self.fragments)
        for number, fragment in enumerate(self.fragments):
            dues = range(number * every // count, step + 1, every)
            if fragment.flight is None and any(due > self.clocks[number] for due in dues):
                mean, errors = self._mean(fragment)
                fragment.flight = Flight(step, mean, list(self.samples), errors)
            flight = fragment.flight
            if flight is not None and step >= flight.sent + self.algorithm.delay:
                fragment.anchor.grad = flight.mean
                fragment.outer.step()
                self.clocks[number], fragment.began, fragment.flight = flight.sent, flight.samples, None
                fragment.errors = flight.errors
                for replica in self.replicas:
                    alpha, common = self.algorithm.alpha, fragment.anchor.detach()
                    fragment.put(replica, alpha * fragment.of(replica) + (1 - alpha) * common)

    def _mean(self, fragment: Fragment) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """And the errors that it leaves."""
        used = [now - then for now, then in zip(self.samples, fragment.began, strict=True)]
        weights = used if self.algorithm.weighted_by == "samples" else [float(u > 0) for u in used]
        parts = [
            w / sum(weights) * (fragment.anchor.detach() - fragment.of(replica)) + error
            for w, replica, error in zip(weights, self.replicas, fragment.errors, strict=True)
        ]
        if self.form is None or len(parts) == 1:
            return torch.stack(parts).sum(0), [torch.zeros_like(part) for part in parts]
        sent = [_through(self.form, part, len(parts)) for part in parts]
        total = torch.stack(sent).sum(0)
        mean = _through(self.form, total, len(parts))
        errors = [part - those for part, those in zip(parts, sent, strict=True)]
        size = -(-mean.numel() // len(parts))
        for owner, error in enumerate(errors):
            own = slice(owner * size, (owner + 1) * size)
            error[own] += (total - mean)[own]
        return mean, errors

    def drop(self) -> None:
        """Another generation."""
        for fragment in self.fragments:
            fragment.flight = None

    def run(self, steps: range, shares: Shares, silent: frozenset[int] = frozenset()) -> None:
        """silent: steps in which a worker heals."""
        for step in steps:
            if step not in silent:
                self.exchange(step)
            for place, replica in enumerate(self.replicas):
                replica.learn(step, shares)
                replica.step()
                self.samples[place] += sum(shares.weights[replica.rank])

    def joins(self, replica: Replica) -> None:
        self.replicas.append(replica)
        self.samples.append(0.0)
        for fragment in self.fragments:
            fragment.began.append(0.0)
            fragment.errors.append(torch.zeros_like(fragment.errors[0]))

    def takes_over(self, holder: Worker) -> None:
        """The anchors, momentum and clocks of `holder`."""
        travelling = holder.model.travelling()
        self.clocks = [max(clock, 0) for clock in travelling["clocks"].tolist()]
        for number, fragment in enumerate(self.fragments):
            if int(travelling["clocks"][number]) < 0:
                continue
            fragment.anchor.data.copy_(travelling[f"anchor.{number}.0"])
            momentum = travelling[f"momentum.{number}.0"].clone()
            fragment.outer.state[fragment.anchor]["momentum_buffer"] = momentum

    def check(self, members: Sequence[Worker], atol: float = 1e-5) -> None:
        """Weights and anchors are the members'; the members' common state is equal bit for bit."""
        first = members[0].model.travelling()
        for worker, replica in zip(members, self.replicas, strict=True):
            torch.testing.assert_close(worker.weights(), replica.weights(), rtol=1e-4, atol=atol)
            for name, tensor in worker.model.travelling().items():
                assert torch.equal(tensor, first[name]), f"{name} is not alike on all"
        assert first["clocks"].tolist() == self.clocks
        for number, fragment in enumerate(self.fragments):
            torch.testing.assert_close(
                first[f"anchor.{number}.0"], fragment.anchor.detach(), rtol=1e-4, atol=atol
            )


def _through(form: WithFeedback, flat: torch.Tensor, owners: int) -> torch.Tensor:
    """What arrives of `flat`, which is compressed in as many parts as there are owners."""
    size = -(-flat.numel() // owners)
    rows = torch.zeros(owners, size)
    rows.view(-1)[: flat.numel()] = flat
    out = torch.zeros(owners, form.size_bytes(size), dtype=torch.uint8)
    form.encode(rows, torch.zeros_like(rows), torch.zeros_like(rows), out)
    form.decompress(out, rows)
    return rows.view(-1)[: flat.numel()].clone()
