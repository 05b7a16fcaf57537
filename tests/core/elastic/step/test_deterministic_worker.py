"""What a deterministic job does with compiled code: the same bits on a process of any history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.elastic.step.deterministic_worker import use_deterministic_kernels


class Net(nn.Module):
    """Has operations of which compiled code gives other bits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.inner(x))
        h = torch.sigmoid(h) * torch.tanh(h) + h / (1.0 + h * h).sqrt()
        return self.outer(nn.functional.gelu(h)).softmax(-1).log()


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Those of a deterministic job, for one test."""
    threads, filled = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
    use_deterministic_kernels()
    yield
    torch.compiler.set_stance("default")
    torch._C._jit_set_profiling_executor(True)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.backends.cudnn.deterministic = False
    torch.set_num_threads(threads)


def as_a_function(net: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(net, backend=backend)  # type: ignore[return-value]


def as_a_method(net: nn.Module, backend: Any) -> nn.Module:
    net.compile(backend=backend)
    return net


@pytest.mark.parametrize("compile_it", [as_a_function, as_a_method])
def test_compiled_modules_run_eagerly(compile_it: Callable[[nn.Module, Any], nn.Module]) -> None:
    """Else a worker that has drawn shards of two sizes has another kernel than one that has drawn one."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    net = Net()
    model = compile_it(net, backend)
    for samples in (4, 5):
        model(torch.ones(samples, 32)).sum().backward()
    assert compiled == [] and net.inner.weight.grad is not None


def test_a_scripted_module_has_the_same_bits_in_its_first_call_and_in_later_ones() -> None:
    torch.manual_seed(0)
    net = Net()
    scripted, x = torch.jit.script(net), torch.randn(5, 20, 32)
    found = []
    for _ in range(4):
        net.zero_grad()
        scripted(x).square().mean().backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    for later in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], later, strict=True))
