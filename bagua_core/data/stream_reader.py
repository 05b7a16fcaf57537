"""Reads a stream, a data set that is only iterated, by (epoch, batch); every worker reads the whole of it.

Owns the iteration of the data set, the items of the batch under way, and what travels to a worker that joins: the ends
of epochs, and a mark, by which a batch is read again and recognised. Knows nothing of workers and shares.
Invariants: a batch has the same items however it was reached (read on, from a state, or from the epoch's beginning), or
StreamError is raised. An iteration that raised is never continued: Python's generators would then claim their end.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from bagua_core.data.partition import mixed_seed
from bagua_core.data.sample_seeding import random_sources_kept, seed_random_sources
from bagua_core.data.stream_digest import digest_of
from bagua_core.elastic.state import state_codec
from bagua_core.errors import UserError

log = logging.getLogger(__name__)

# Of finished epochs. The ledger looks back by a step or two, and by one more for each step in which a worker joined.
KEPT_ENDS = 64


class StreamError(UserError, RuntimeError):
    """A stream has no batch, or not the items that the job has read from it."""


class Mark(NamedTuple):
    """Identifies a batch that was read whole.

    state: of the data set before the batch; None if it can't be read from there.
    """

    epoch: int
    batch: int
    state: Any
    digest: int


class _Source:
    """The data set with the settings of reading it. seed None: its random numbers are the script's."""

    def __init__(self, dataset: Any, size: int, drop_last: bool, seed: int | None) -> None:
        self.dataset = dataset
        self.size = size
        self.drop_last = drop_last
        self.seed = seed
        self.has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")

    def state(self) -> Any:
        return copy.deepcopy(self.dataset.state_dict()) if self.has_state else None

    def load(self, state: Any) -> None:
        self.dataset.load_state_dict(copy.deepcopy(state))

    def seed_for(self, epoch: int, place: int = 0) -> None:
        """Seeds the random sources for the item at `place`. What begins an epoch has the seed of place 0: an order that
        is drawn with the first item is drawn again where a state is loaded, or where the iteration begins."""
        if self.seed is not None:
            seed_random_sources(mixed_seed(mixed_seed(self.seed, epoch), place))


class _Pass:
    """An iteration of the data set in `epoch`. batch: the number of the next batch; state: before that batch."""

    def __init__(self, source: _Source, epoch: int, batch: int, state: Any) -> None:
        self._source = source
        self.epoch = epoch
        self.batch = self.began_at = batch
        self.state = state
        self.is_over = False
        self._ahead: list[Any] = []
        source.seed_for(epoch)
        self._iterator = iter(source.dataset)

    @property
    def has_batch(self) -> bool:
        """Whether the epoch has a batch behind those that `read` returned."""
        return len(self._ahead) >= (self._source.size if self._source.drop_last else 1)

    def read(self) -> list[Any]:
        """Returns the items of the next batch, fewer at the epoch's end."""
        size = self._source.size
        first = self.batch * size
        items = self._ahead + self._draw(first + len(self._ahead), size - len(self._ahead))
        self.state = self._source.state()  # before an item of the batch behind is drawn
        self._ahead = self._draw(first + size, size if self._source.drop_last else 1)
        self.batch += 1
        return items

    def _draw(self, place: int, count: int) -> list[Any]:
        items: list[Any] = []
        while len(items) < count and not self.is_over:
            self._source.seed_for(self.epoch, place + len(items))
            try:
                items.append(next(self._iterator))
            except StopIteration:
                self.is_over = True
        return items


class StreamReader:
    """Reads the batches of a stream by (epoch, batch).

    It is also the data set of the loader's Prefetcher: its indices are places in the epoch, of the batch that was read
    last, and -1 and -2 for the fillers.
    """

    def __init__(self, dataset: Any, size: int, drop_last: bool, seed: int | None) -> None:
        """Takes the stream, without reading it. size: items of a batch."""
        self._source = _Source(dataset, size, drop_last, seed)
        self._size = size
        self.ends: dict[int, int] = {}  # by epoch: the number of its items that the job uses, once known
        self.first_digest = 0  # of the first batch of epoch 0
        self._fillers: list[Any] = []
        self._items: list[Any] = []
        self._held: Mark | None = None  # whose items these are
        self._mark: Mark | None = None  # the newest batch of the job that is known, maybe by another worker
        self._pass: _Pass | None = None
        self._has_begun = False
        self._at_rest: Any = None  # the data set's state before it was iterated at all
        self._trusts_state = self._source.has_state

    def prepare(self) -> None:
        """Reads the first batch of epoch 0. Raises StreamError, CannotTravel."""
        if self._fillers:
            return
        self.read(0, 0)
        assert self._held is not None
        self.first_digest = self._held.digest
        self._fillers = self._items[:2]
        state_codec.encode(self._source.state())  # now, and not only when a worker joins

    @property
    def fillers(self) -> list[int]:
        return [~place for place in range(len(self._fillers))]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        # Copies: a collate_fn may take entries out of a dictionary, and a step that failed uses the items again.
        first = self._held.batch * self._size if self._held else 0
        found = [self._items[i - first] if i >= 0 else self._fillers[~i] for i in indices]
        return [copy.copy(item) if isinstance(item, (dict, list)) else item for item in found]

    def read(self, epoch: int, batch: int) -> None:
        """Reads the items of the batch, and finds out whether it is the epoch's last.

        Raises StreamError, and what the data set raises.
        """
        if self._held is not None and (self._held.epoch, self._held.batch) == (epoch, batch):
            return
        with random_sources_kept() if self._source.seed is not None else nullcontext():
            try:
                before = self._end_before(epoch)
                if before is not None:
                    if self._usable_mark(*before[:2]) is None:
                        log.warning(
                            "%s has neither a usable state nor set_epoch: epoch %d is read first, before epoch %d",
                            type(self._source.dataset).__name__,
                            before.epoch,
                            epoch,
                        )
                    self._read_to(before.epoch, before.batch)
                self._read_to(epoch, batch)
            except BaseException:
                self._pass = None
                raise

    def _end_before(self, epoch: int) -> Mark | None:
        """Returns the mark at which the epoch before was left, if this epoch may follow from how that one ended: a
        sampler in the data set may go on with its own generator, or count its iterations."""
        current, mark, held = self._pass, self._mark, self._held
        is_behind = current is not None and (
            current.epoch == epoch or (current.epoch == epoch - 1 and current.is_over)
        )
        if is_behind or mark is None or mark.epoch != epoch - 1:
            return None
        # A stream without set_epoch that was left elsewhere is compared at the mark, and refused if it differs there.
        is_new_here = held is None or held[:2] != mark[:2]
        has_own_order = is_new_here and not hasattr(self._source.dataset, "set_epoch")
        return mark if has_own_order or self._usable_mark(epoch - 1) else None

    def _read_to(self, epoch: int, batch: int) -> None:
        while not self._read_on(epoch, batch):
            continue

    def _read_on(self, epoch: int, batch: int) -> bool:
        """Reads one batch on the way to `batch`. Returns whether it is that one."""
        current = self._pass
        mark = self._usable_mark(epoch, batch)
        begins_at = mark.batch if mark else 0
        if current is None or current.epoch != epoch or not begins_at <= current.batch <= batch:
            current = self._pass = self._open(epoch, mark)
        number = current.batch
        state = current.state if self._trusts_state else None
        items = current.read()
        read = Mark(epoch, number, state, digest_of(items))
        known = self._mark
        if known is not None and known[:2] == read[:2] and known.digest != read.digest:
            self._differs(current, read)
            return False
        if not items or (self._source.drop_last and len(items) < self._size):
            raise StreamError(self._no_batch(epoch, number, len(items)))
        self._note_end(epoch, number * self._size + len(items), is_last=not current.has_batch)
        if known is None or known.epoch != epoch or known.batch <= number:
            self._mark = read
        self._held, self._items = read, items
        return number == batch

    def _usable_mark(self, epoch: int, batch: int | None = None) -> Mark | None:
        """Returns the mark from which `epoch` can be read, at or before `batch`; None if there is none."""
        mark = self._mark
        if mark is None or mark.state is None or not self._trusts_state or mark.epoch != epoch:
            return None
        return mark if batch is None or mark.batch <= batch else None

    def _open(self, epoch: int, mark: Mark | None) -> _Pass:
        source = self._source
        has_begun, self._has_begun = self._has_begun, True
        source.seed_for(epoch)
        if not has_begun:
            self._at_rest = source.state()
        if hasattr(source.dataset, "set_epoch"):
            source.dataset.set_epoch(epoch)
        if mark is not None:
            source.load(mark.state)
            return _Pass(source, epoch, mark.batch, mark.state)
        state = source.state()
        is_left = has_begun and (self._pass is None or not self._pass.is_over)
        if is_left and self._at_rest is not None:
            state = self._at_rest  # reading may have moved the data set's own position
            source.load(state)
        return _Pass(source, epoch, 0, state)

    def _differs(self, current: _Pass, read: Mark) -> None:
        """Handles a batch in which the job has other items. Raises StreamError if there is no other way to read it."""
        kind, self._pass = type(self._source.dataset).__name__, None
        if not current.began_at:
            raise StreamError(
                f"{kind} has other items in batch {read.batch} of epoch {read.epoch} than the job read there. Its "
                "items must be the same on every worker and each time: derive them from set_epoch(epoch) or from the "
                "global generators, and do not shard by rank"
            )
        self._trusts_state = False
        log.warning(
            "load_state_dict of %s does not continue where state_dict was taken, as with a buffer that shuffles: "
            "epochs are read from their beginning instead",
            kind,
        )

    def _note_end(self, epoch: int, place: int, is_last: bool) -> None:
        known = self.ends.get(epoch)
        if known is not None and (place > known or is_last != (place == known)):
            raise StreamError(
                f"{type(self._source.dataset).__name__} has another end of epoch {epoch} than the {known} items "
                "of the job; its length must be the same on every worker and each time"
            )
        if is_last:
            self._keep_ends({epoch: place})

    def _keep_ends(self, ends: dict[int, int]) -> None:
        self.ends = dict(sorted({**self.ends, **ends}.items())[-KEPT_ENDS:])

    def _no_batch(self, epoch: int, batch: int, count: int) -> str:
        kind = type(self._source.dataset).__name__
        if batch:
            return (
                f"{kind} ended in batch {batch} of epoch {epoch}, where the job has more items; its length must be the "
                "same on every worker and each time"
            )
        return f"{kind} gave {count} items for epoch {epoch}, which make no batch of global_batch_size={self._size}"

    # -- the state that travels

    def state_dict(self) -> dict[str, Any]:
        mark = None if self._mark is None else list(self._mark)
        return {"ends": [list(item) for item in self.ends.items()], "mark": mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the job's ends and mark, for the next batch that is not read yet. Raises StreamError if a batch
        differs."""
        mark = None if state["mark"] is None else Mark(*state["mark"])
        held = self._held
        if mark is not None and held is not None and mark[:2] == held[:2] and mark.digest != held.digest:
            self._held = None
            if self._pass is not None:
                self._differs(self._pass, mark)
        self._keep_ends(dict(state["ends"]))
        self._mark = mark
