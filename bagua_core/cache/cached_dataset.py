"""Provides CachedDataset, which wraps a data set and computes each of its samples once."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from bagua_core.cache.cache_loader import CacheLoader, CacheStatistics
from bagua_core.cache.cache_plan import DEFAULT_BUFFER_SIZE, plan
from bagua_core.cache.errors import CacheOptionError
from bagua_core.cache.hit_metrics import HitMetrics

_made: dict[str, weakref.ref[Any]] = {}  # data sets without a name, by what tells them apart
_made_lock = threading.Lock()


class CachedDataset(Dataset[Any]):
    """A map-style data set whose samples are kept the first time they are read.

        dataset = CachedDataset(Faces(root), dataset_name="faces", transform=random_crop)

    `dataset` must give the same sample for the same index every time. Random augmentation goes into `transform`, which
    is applied to every sample read, known or not, and whose result is not kept. In a DataLoader's processes and under
    ElasticDataLoader it works like any data set; see CacheLoader for what is kept, and what happens when it is full.
    """

    def __init__(
        self,
        dataset: Any,
        backend: str = "embedded",
        dataset_name: str = "",
        writer_buffer_size: int = DEFAULT_BUFFER_SIZE,
        *,
        transform: Callable[[Any], Any] | None = None,
        fingerprint: str = "",
        pickle: bool = False,
        **options: Any,
    ) -> None:
        """dataset: map-style: with a length, and samples by index.
        transform: applied to each sample that is read; its result is not kept.
        fingerprint: change it with whatever changes the samples; the type and length of `dataset` count anyway.
        backend, dataset_name, writer_buffer_size, pickle, options: as for CacheLoader.

        Raises CacheOptionError, MissingPartError, and TypeError for a data set without length or index.
        """
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                raise TypeError(
                    f"{type(dataset).__name__} has no {method}: only a map-style data set can be cached"
                )
        kind = type(dataset)
        told = f"{kind.__module__}.{kind.__qualname__}\0{len(dataset)}\0{fingerprint}"
        if not dataset_name:
            _require_alone(dataset, told)
        self.dataset = dataset
        self.transform = transform
        made = plan(backend, dataset_name, told, writer_buffer_size, pickle, options)
        self.cache_loader = CacheLoader._of_plan(made)
        self._metrics = HitMetrics(self.cache_loader, dataset_name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        (sample,) = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        samples = self.cache_loader.get_many([self._number(index) for index in indices], self._load)
        return samples if self.transform is None else [self.transform(sample) for sample in samples]

    def stats(self) -> CacheStatistics:
        """Hits, misses and fill, summed over all processes of this node."""
        return self.cache_loader.stats()

    def close(self) -> None:
        """See CacheLoader.close."""
        self._metrics.close()
        self.cache_loader.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_metrics": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a child's reads are counted in the shared counters, which its parent reports
        self.__dict__.update(state, _metrics=HitMetrics(None, ""))

    def _number(self, index: Any) -> int:
        number = operator.index(index)
        return number + len(self.dataset) if number < 0 else number

    def _load(self, numbers: list[int]) -> Sequence[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if together is not None:
            samples: Sequence[Any] = together(numbers)
            return samples
        return [self.dataset[number] for number in numbers]


def _require_alone(dataset: Any, told: str) -> None:
    """Two data sets of one type and length, both without a name, would be taken for one."""
    with _made_lock:
        known = _made.get(told)
        other = None if known is None else known()
        if other is not None and other is not dataset:
            kind = type(dataset).__name__
            raise CacheOptionError(
                f"two data sets of type {kind} with {len(dataset)} samples and no name: give each its dataset_name"
            )
        try:
            _made[told] = weakref.ref(dataset)
        except TypeError:
            return  # a type without weak references, such as a list: nothing can be said
