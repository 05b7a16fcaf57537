"""The tasks of benchmarks.fidelity, the usual ones each small enough for a minute on two cores.

`digits`: handwritten digits (scikit-learn's, part of its package), a network of two hidden layers. `characters`: the
model of examples/char_lm.py on the sources of Python's standard library. Both with a rate that falls to zero, so that
the final loss says where training led and not where it happened to be, and with buckets that are large enough to be
compressed. `words`: which module of the standard library a few words come from, by an embedding whose rows are used by
few samples; many of them for the first time after QAdam's warm-up.
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bagua_core.algorithms.streaming_diloco import DEFAULT_SYNC_EVERY as DILOCO_SYNC_EVERY
from benchmarks.algorithm_choices import Settings
from benchmarks.result_file import ROOT

# Training sets are whole batches: in a short one ranks have unequal shares, which DDP weighs otherwise.
_DIGITS = 1408
_WINDOWS, _WINDOWS_HELD_OUT = 960, 200
_MANY_WINDOWS = 16_384
_LOOKED_AT = 1024  # windows at once
_MODULES, _VOCABULARY, _WORDS, _WIDTH = 20, 2000, 12, 32
_WORD_WINDOWS, _WORD_WINDOWS_HELD_OUT = 6400, 1000
# Of all steps. In so short a training the second moment has not settled at the 0.2 of long ones.
QADAM_WARM_UP = 0.3
# Of a fragment in a training, unless that makes rounds too short or longer than they are by default.
_DILOCO_ROUNDS, _LEAST_DILOCO_EVERY = 20, 10


Pieces = tuple[TensorDataset, TensorDataset]


@dataclass(frozen=True, slots=True)
class Task:
    """pieces: training set and held-out set. is_usual: trained unless others are asked for."""

    name: str
    settings: Settings
    global_batch: int
    epochs: int
    build: Callable[[], nn.Module]
    pieces: Callable[[], Pieces]
    is_usual: bool = True

    def loss(self, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def settings_for(self, steps: int) -> Settings:
        return replace(
            self.settings,
            qadam_warmup_steps=max(1, round(steps * QADAM_WARM_UP)),
            diloco_every=min(DILOCO_SYNC_EVERY, max(_LEAST_DILOCO_EVERY, steps // _DILOCO_ROUNDS)),
        )

    @torch.no_grad()
    def loss_over(self, model: nn.Module, dataset: TensorDataset) -> float:
        """Mean over the whole set."""
        model.eval()
        parts = [
            tuple(t[begin : begin + _LOOKED_AT] for t in dataset.tensors)
            for begin in range(0, len(dataset), _LOOKED_AT)
        ]
        total = sum(self.loss(model, x, y).item() * len(x) for x, y in parts)
        model.train()
        return total / len(dataset)


def _digits() -> Pieces:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise SystemExit(
            "the digits are scikit-learn's: pip install -e '.[bench]', or --task characters"
        ) from error
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:_DIGITS], order[_DIGITS:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[held_out], y[held_out])


def _digits_network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def char_lm() -> ModuleType:
    """examples/char_lm.py, which lies in no package."""
    spec = importlib.util.spec_from_file_location("char_lm", ROOT / "examples" / "char_lm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _characters(windows: int = _WINDOWS) -> Pieces:
    example = char_lm()
    length = windows * example.CONTEXT
    text = example.read_text(length + _WINDOWS_HELD_OUT * example.CONTEXT + 1)
    # a window's last target is the next one's first character
    return _windows(example, text[: length + 1]), _windows(example, text[length:])


def _windows(example: ModuleType, text: Tensor) -> TensorDataset:
    """x, y: [windows, CONTEXT]."""
    windows = example.Windows(text)
    pairs = [windows[index] for index in range(len(windows))]
    return TensorDataset(torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))


def _character_model() -> nn.Module:
    model: nn.Module = char_lm().CharacterModel(width=48, layers=1, heads=4)
    return model


def _words() -> Pieces:
    """Windows of words from the largest modules of the standard library; the class is the module."""
    directory = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(directory.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))[:_MODULES]
    texts = [re.findall(r"[A-Za-z_]{2,}", path.read_text(errors="replace")) for path in sources]
    counts = Counter(word for text in texts for word in text)
    common = sorted(counts, key=lambda word: (-counts[word], word))[: _VOCABULARY - 1]
    number = {word: place + 1 for place, word in enumerate(common)}  # 0: any other
    windows, modules = [], []
    for module, text in enumerate(texts):
        numbers = [number.get(word, 0) for word in text]
        for begin in range(0, len(numbers) - _WORDS + 1, _WORDS):
            windows.append(numbers[begin : begin + _WORDS])
            modules.append(module)
    x, y = torch.tensor(windows), torch.tensor(modules)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:_WORD_WINDOWS], order[_WORD_WINDOWS : _WORD_WINDOWS + _WORD_WINDOWS_HELD_OUT]
    return TensorDataset(x[train], y[train]), TensorDataset(x[held_out], y[held_out])


class _MeanOfWords(nn.Module):
    """Dense gradients, of which most rows are zero in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.Sequential(nn.Linear(_WIDTH, 512), nn.Tanh(), nn.Linear(512, _MODULES))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(self.embedding(x).mean(dim=1))
        return found


def save_pieces(pieces: Pieces, path: Path) -> None:
    """For workers, of whom none needs what made them: to import scikit-learn takes longer than to train."""
    torch.save([piece.tensors for piece in pieces], path)


def load_pieces(path: Path) -> Pieces:
    train, held_out = (TensorDataset(*tensors) for tensors in torch.load(path))
    return train, held_out


def _character_task(
    name: str, optimizer: str, is_usual: bool, windows: int = _WINDOWS, epochs: int = 6
) -> Task:
    # 44,000 parameters. SGD's rate is half of the one at which averages of weights with momentum still hold.
    return Task(
        name,
        Settings(optimizer, lr=0.2, adam_lr=1.6e-2, momentum=0.9, async_interval_ms=100, hierarchical=False),
        global_batch=32,
        epochs=epochs,
        build=_character_model,
        pieces=lambda: _characters(windows),
        is_usual=is_usual,
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "digits",  # 51,000 parameters
            Settings("sgd", lr=0.05, adam_lr=2e-3, momentum=0.9, async_interval_ms=20, hierarchical=False),
            global_batch=64,
            epochs=10,
            build=_digits_network,
            pieces=_digits,
        ),
        _character_task("characters", "sgd", True),
        Task(
            "words",  # 91,000 parameters, most of them the embedding's
            Settings("adam", lr=0.2, adam_lr=1e-2, momentum=0.9, async_interval_ms=100, hierarchical=False),
            global_batch=32,
            epochs=1,
            build=_MeanOfWords,
            pieces=_words,
        ),
        # Where replicas differ each has its own second moments, of few samples' gradients: they learn more slowly.
        _character_task("characters_adam", "adam", False),
        # 2,048 steps, for algorithms whose rounds take a hundred.
        _character_task("characters_long", "sgd", False, _MANY_WINDOWS, 4),
    )
}
