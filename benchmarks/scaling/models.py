"""The models of the study: their tensors in the order of registration, and the part of the computation of each layer.

Tensors and operations follow from the published architectures. The time of a sample is an input: models.py does not
know the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bagua_core.communication.reduction.buckets import GradientSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """tensors: numbers of elements. work: of one sample's forward, in any unit that all layers share."""

    name: str
    tensors: tuple[int, ...]
    work: float


@dataclass(frozen=True, slots=True)
class Model:
    """layers: in the order of the forward. gradient_bytes: 4, or 2 for half precision."""

    name: str
    layers: tuple[Layer, ...]
    gradient_bytes: int = 4

    def __post_init__(self) -> None:
        if self.gradient_bytes not in (2, 4):
            raise ValueError(f"gradients of {self.gradient_bytes} bytes; use 2 or 4")

    @property
    def parameters(self) -> int:
        return sum(sum(layer.tensors) for layer in self.layers)

    @property
    def size_bytes(self) -> int:
        return self.parameters * self.gradient_bytes

    def specs(self) -> list[GradientSpec]:
        """As the runtime's planning of buckets takes them."""
        dtype = torch.float32 if self.gradient_bytes == 4 else torch.bfloat16
        device = torch.device("cpu")
        return [GradientSpec(count, dtype, device) for layer in self.layers for count in layer.tensors]

    def ready_after(self) -> list[float]:
        """For each tensor in the order of registration: the part of the backward's time after which its gradient is
        there. Backward visits the layers in reverse; a layer's tensors are ready together."""
        whole = sum(layer.work for layer in self.layers)
        done, parts = 0.0, []
        for layer in reversed(self.layers):
            done += layer.work
            parts += [done / whole] * len(layer.tensors)
        return parts[::-1]


def _convolution(name: str, inputs: int, outputs: int, side: int, kernel: int = 3) -> Layer:
    """side: of the square output."""
    weights = kernel * kernel * inputs * outputs
    return Layer(name, (weights, outputs), weights * side * side)


def _linear(name: str, inputs: int, outputs: int) -> Layer:
    return Layer(name, (inputs * outputs, outputs), inputs * outputs)


def vgg16() -> Model:
    """138.4 M parameters, for images of 224 x 224 (arXiv 1409.1556, configuration D)."""
    plan = [(3, 64, 224), (64, 64, 224), (64, 128, 112), (128, 128, 112)]
    plan += [(128, 256, 56), (256, 256, 56), (256, 256, 56), (256, 512, 28), (512, 512, 28), (512, 512, 28)]
    plan += [(512, 512, 14)] * 3
    layers = [_convolution(f"conv{i}", *shape) for i, shape in enumerate(plan)]
    layers += [_linear("fc0", 25088, 4096), _linear("fc1", 4096, 4096), _linear("fc2", 4096, 1000)]
    return Model("VGG16", tuple(layers))


def bert_large(length: int = 384) -> Model:
    """335 M parameters (arXiv 1810.04805), with sequences of `length` tokens."""
    hidden, blocks, words = 1024, 24, 30522
    norm = (hidden, hidden)
    embedding = Layer("embedding", (words * hidden, 512 * hidden, 2 * hidden, *norm), 0.0)
    square, wide = hidden * hidden, 4 * hidden * hidden
    tensors = (square, hidden) * 4 + norm + (wide, 4 * hidden, wide, hidden) + norm
    work = length * (4 * square + 2 * wide) + 2 * length * length * hidden
    encoder = [Layer(f"block{i}", tensors, float(work)) for i in range(blocks)]
    head = Layer("head", (2 * hidden, 2), float(length * 2 * hidden))
    return Model("BERT-Large", (embedding, *encoder, head))


def lstm_alexnet(steps: int = 64) -> Model:
    """AlexNet beside two LSTM layers of 1,740 units: 118 M parameters. Its shapes are ours: the paper's task is not
    published."""
    convolutions = [
        (3, 64, 55, 11),
        (64, 192, 27, 5),
        (192, 384, 13, 3),
        (384, 256, 13, 3),
        (256, 256, 13, 3),
    ]
    layers = [_convolution(f"conv{i}", *shape) for i, shape in enumerate(convolutions)]
    layers += [_linear("fc0", 9216, 4096), _linear("fc1", 4096, 4096), _linear("fc2", 4096, 1000)]
    width, units = 3000, 1740
    for number, inputs in enumerate((width, units)):
        gates = 4 * units * (inputs + units)
        tensors = (4 * units * inputs, 4 * units * units, 4 * units, 4 * units)
        layers.append(Layer(f"lstm{number}", tensors, float(steps * gates)))
    return Model("LSTM+AlexNet", tuple(layers))


def llama_7b(length: int = 4096) -> Model:
    """6.7 B parameters (arXiv 2302.13971), gradients in bfloat16; its layers as FSDP wraps them."""
    hidden, inner, blocks, words = 4096, 11008, 32, 32000
    tensors = (hidden * hidden,) * 4 + (hidden * inner,) * 3 + (hidden, hidden)
    work = length * (4 * hidden * hidden + 3 * hidden * inner) + 2 * length * length * hidden
    embedding = Layer("embedding", (words * hidden,), 0.0)
    body = [Layer(f"block{i}", tensors, float(work)) for i in range(blocks)]
    head = Layer("head", (hidden, words * hidden), float(length * words * hidden))
    return Model("7B HSDP", (embedding, *body, head), gradient_bytes=2)


def uniform(name: str, sizes: Sequence[int]) -> Model:
    """Layers of one tensor each and equal work, as the lab's workers have them."""
    return Model(name, tuple(Layer(f"layer{i}", (size,), 1.0) for i, size in enumerate(sizes)))
