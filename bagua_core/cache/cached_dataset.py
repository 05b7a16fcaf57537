"""Provides CachedDataset, which wraps a data set and computes each of its samples once."""

from __future__ import annotations

import operator
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset

from bagua_core.cache.cache_loader import CacheLoader, CacheStatistics
from bagua_core.cache.cache_plan import DEFAULT_BUFFER_SIZE, plan
from bagua_core.cache.errors import CacheOptionError
from bagua_core.cache.hit_metrics import HitMetrics

# References to the sources of data sets without a name, by cache; each gives None once its source is gone. An entry
# stays: another process may still use what is gone here, and its samples are still in the cache then.
_made: dict[tuple[str, str], list[Callable[[], Any]]] = {}
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
        """Opens the cache of the data set.

        dataset: map-style: with a length, and samples by index.
        transform: applied to each sample that is read; its result is not kept.
        fingerprint: change it with whatever changes the samples; the type and length of `dataset` count anyway, and of
        torch's Subset and ConcatDataset also the indices and the data sets within.
        backend, dataset_name, writer_buffer_size, pickle, options: as for CacheLoader.

        Raises CacheOptionError, MissingPartError, and TypeError for a data set without length or index.
        """
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                raise TypeError(
                    f"{type(dataset).__name__} has no {method}: only a map-style data set can be cached"
                )
        self.dataset = dataset
        self.transform = transform
        identity = f"{_identity(dataset)}\0{fingerprint}"
        made = plan(backend, dataset_name, identity, writer_buffer_size, pickle, options)
        if not dataset_name:
            _require_alone(dataset, (made.name, made.prefix.decode() or str(made.base)))
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
        """Returns hits, misses and fill, summed over all processes of this node."""
        return self.cache_loader.stats()

    def close(self) -> None:
        """Closes the cache; see CacheLoader.close."""
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


def _identity(dataset: Any) -> str:
    """Returns a text that identifies the samples, equal in all processes. Parts of one data set, as each worker may
    cache its own, differ in their indices alone."""
    kind = type(dataset)
    length = len(dataset) if hasattr(dataset, "__len__") else "unknown"
    identity = [f"{kind.__module__}.{kind.__qualname__}\0{length}"]
    if isinstance(dataset, Subset):
        identity.append(_digest(dataset.indices))
    if parts := _parts(dataset):
        identity += [str(len(parts)), *map(_identity, parts)]
    return "\0".join(identity)


def _parts(dataset: Any) -> list[Any]:
    if isinstance(dataset, Subset):
        return [dataset.dataset]
    return list(dataset.datasets) if isinstance(dataset, ConcatDataset) else []


def _digest(indices: Sequence[Any]) -> str:
    each = indices.tolist() if hasattr(indices, "tolist") else indices
    try:
        content = array("q", map(operator.index, each)).tobytes()
    except (TypeError, OverflowError):  # keys of another type
        content = repr(list(each)).encode("utf-8", "surrogatepass")
    return blake2b(content, digest_size=12).hexdigest()


def _sources(dataset: Any) -> list[Any]:
    """Returns the data sets of which torch's wrappers consist."""
    parts = _parts(dataset)
    return [source for part in parts for source in _sources(part)] if parts else [dataset]


def _require_alone(dataset: Any, cache: tuple[str, str]) -> None:
    """Checks that no other data set without a name was given this cache, or both would be taken for one.

    cache: equal for data sets that look alike. Raises CacheOptionError unless the sources are the same objects.
    """
    sources = _sources(dataset)
    with _made_lock:
        known = [reference() for reference in _made.setdefault(cache, [_reference(s) for s in sources])]
    if len(known) != len(sources) or any(a is not b for a, b in zip(known, sources, strict=True)):
        raise CacheOptionError(
            f"two data sets of type {type(dataset).__name__} with {len(dataset)} samples and no name: give each its "
            "dataset_name. One that is made again counts as another"
        )


def _reference(source: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(source)
    except TypeError:  # a type without weak references, such as a list: it is kept instead
        return lambda: source
