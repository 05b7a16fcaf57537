"""The parameter shapes of the models whose optimizers are compared. An optimizer sees nothing else of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

Shape = tuple[int, ...]


def bert(hidden: int, layers: int = 12, vocabulary: int = 30522, positions: int = 512) -> Iterator[Shape]:
    """As BertModel has them, with its pooler."""
    yield from [(vocabulary, hidden), (positions, hidden), (2, hidden), (hidden,), (hidden,)]
    for _ in range(layers):
        for _ in range(4):  # query, key, value, output
            yield from [(hidden, hidden), (hidden,)]
        yield from [(hidden,), (hidden,)]
        yield from [
            (4 * hidden, hidden),
            (4 * hidden,),
            (hidden, 4 * hidden),
            (hidden,),
            (hidden,),
            (hidden,),
        ]
    yield from [(hidden, hidden), (hidden,)]


def vit(hidden: int = 768, layers: int = 12, patch: int = 16, classes: int = 1000) -> Iterator[Shape]:
    """As torchvision's vit_b_16 has them."""
    yield from [(1, 1, hidden), (hidden, 3, patch, patch), (hidden,), (1, 197, hidden)]
    for _ in range(layers):
        yield from [(hidden,), (hidden,), (3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
        yield from [
            (hidden,),
            (hidden,),
            (4 * hidden, hidden),
            (4 * hidden,),
            (hidden, 4 * hidden),
            (hidden,),
        ]
    yield from [(hidden,), (hidden,), (classes, hidden), (classes,)]


def narrow_layers(width: int = 32, layers: int = 100) -> Iterator[Shape]:
    for _ in range(layers):
        yield from [(width, width), (width,)]


MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "100 layers of 32": narrow_layers,
    "BERT, hidden 64": lambda: bert(64, vocabulary=1000, positions=128),
    "BERT-base": lambda: bert(768),
    "ViT-B/16": vit,
}
SMALL = ("100 layers of 32", "BERT, hidden 64")


def parameters(shapes: Iterator[Shape], device: torch.device) -> list[torch.nn.Parameter]:
    """The same values in every call, with gradients of such sizes as training has."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        parameter = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device))
        parameter.grad = (torch.randn(shape, generator=generator) * 0.01).to(device)
        made.append(parameter)
    return made
