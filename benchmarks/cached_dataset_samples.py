"""Data sets for benchmarks.cached_dataset: two kinds of costly samples, and the same samples in plain memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

_SOURCE = (375, 500)  # pixels of an image before it is made smaller: those of many a photograph in ImageNet
_SMALL = 64


class Images(Dataset[Any]):
    """(48 KiB of pixels, label): drawn, in the place of decoding a file, made smaller, normalized."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(index)
        image = torch.rand(1, 3, *_SOURCE, generator=torch.Generator().manual_seed(index))
        image = F.interpolate(image, size=_SMALL, mode="bicubic", antialias=True)[0]
        return (image - image.mean((1, 2), keepdim=True)) / image.std((1, 2), keepdim=True), index % 10


class Tokens(Dataset[Any]):
    """(4 KiB of token numbers, label): words of a made-up text, counted and looked up one by one."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(index)
        numbers = torch.randint(
            0, 1 << 30, (4 * 512,), generator=torch.Generator().manual_seed(index)
        ).tolist()
        known: dict[str, int] = {}
        tokens = [known.setdefault("".join(sorted(f"{number:x}")), len(known)) for number in numbers]
        return torch.tensor(tokens[-512:]), index % 10


class InMemory(Dataset[Any]):
    """Everything computed before, in a list."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


KINDS: dict[str, type[Any]] = {"images": Images, "tokens": Tokens}
