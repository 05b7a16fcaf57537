"""Writes the bytes of a copied state, beside the live state or into it.

`Staging` is discarded whole if the copy fails. `InPlace` writes into parameters and optimizer state that fit, so what
it writes over is lost with the first byte: `declare` runs before it, and after `give_up` has returned nothing is
written any more, whatever an abandoned copy still receives. Knows nothing of peers and checksums.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from bagua_core import value_tree
from bagua_core.communication.communicator import CollectiveAborted
from bagua_core.elastic.heal import pinned_chunks
from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.flat_tensors import FlatTensors
from bagua_core.elastic.state.heal_memory import is_out_of_memory


class ReceivedState(Protocol):
    """Memory that receives a copied state: Staging, InPlace or Fitting. Used in the order `open`, `chunk` and `put` for
    each piece, `state`."""

    def open(self, manifest: bytes, total_bytes: int) -> None:
        """Prepares for the state, before the first byte of a tensor.

        Raises CollectiveFailed if the state cannot land here.
        """

    def chunk(self, begin: int, end: int) -> torch.Tensor:
        """Returns memory (uint8) to receive the state's bytes from `begin` to `end` in."""

    def put(self, begin: int, chunk: torch.Tensor) -> None:
        """Takes `chunk`, which has arrived. Raises CollectiveAborted after give_up."""

    def state(self) -> Any:
        """Returns the state, when all bytes are there and their checksums fit."""

    def give_up(self) -> None: ...


class Staging:
    """Lands the state in memory of its own, a piece for each tensor: what is kept of it must own its memory."""

    def __init__(self) -> None:
        self._manifest = b""
        self._tensors = FlatTensors([])

    def open(self, manifest: bytes, total_bytes: int) -> None:
        self._manifest = manifest
        try:
            self._tensors = state_codec.allocate(manifest)
        except state_codec.StateCodecError as error:
            if error.__cause__ is not None and is_out_of_memory(error.__cause__):
                raise error.__cause__  # noqa: B904 (the caller looks for another place)
            raise

    def chunk(self, begin: int, end: int) -> torch.Tensor:
        return pinned_chunks.room(self._tensors, begin, end)

    def put(self, begin: int, chunk: torch.Tensor) -> None:
        pinned_chunks.write(self._tensors, begin, chunk)

    def state(self) -> Any:
        return state_codec.decode(self._manifest, self._tensors)

    def give_up(self) -> None:
        return None


class InPlace:
    """Lands the state in the live tensors of `own_state` (modules and optimizers of a capture).

    What has no live tensor gets new memory.
    """

    def __init__(
        self,
        own_state: Callable[[], Any],
        declare: Callable[[], None],
        guarded: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Keeps what `open` will need.

        declare: say that the state held so far does not count any more. guarded: holds the guard that `declare` takes,
        if a thread that holds it may call give_up.
        """
        self._own_state = own_state
        self._declare = declare
        self._guarded = guarded
        self._manifest = b""
        self._targets = FlatTensors([])
        self._lock = threading.Lock()
        self._is_given_up = False

    def open(self, manifest: bytes, total_bytes: int) -> None:
        self._manifest = manifest
        own_manifest, own_tensors = state_codec.encode(self._own_state())
        # before the state is declared void: it stays valid if the other one cannot land here
        found = FlatTensors(targets(manifest, own_manifest, own_tensors))
        with self._guarded(), self._lock:  # in this order: a roll-back gives the copy up under the guard
            if self._is_given_up:
                raise CollectiveAborted("the copy was given up")
            self._declare()
        self._targets = found

    def chunk(self, begin: int, end: int) -> torch.Tensor:
        return pinned_chunks.room(self._targets, begin, end)

    def put(self, begin: int, chunk: torch.Tensor) -> None:
        with self._lock:
            if self._is_given_up:
                raise CollectiveAborted("the copy was given up")
            pinned_chunks.write(self._targets, begin, chunk)

    def state(self) -> Any:
        return state_codec.decode(self._manifest, self._targets)

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True


class Fitting:
    """Stages the state if there is memory for it, else lands it in place.

    For a worker without a state on which another worker relies.
    """

    def __init__(self, fits: Callable[[int], bool], in_place: InPlace) -> None:
        self._fits = fits
        self._in_place = in_place
        self._chosen: ReceivedState = Staging()

    def open(self, manifest: bytes, total_bytes: int) -> None:
        if self._fits(total_bytes):
            try:
                self._chosen.open(manifest, total_bytes)
                return
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
        self._chosen = self._in_place
        self._chosen.open(manifest, total_bytes)

    def chunk(self, begin: int, end: int) -> torch.Tensor:
        return self._chosen.chunk(begin, end)

    def put(self, begin: int, chunk: torch.Tensor) -> None:
        self._chosen.put(begin, chunk)

    def state(self) -> Any:
        return self._chosen.state()

    def give_up(self) -> None:
        self._in_place.give_up()  # whichever was chosen: it may be about to be


def targets(manifest: bytes, own_manifest: bytes, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns a tensor for each that `manifest` describes: the own one in the same place if it looks alike, else a new
    one.

    Own ones do not include those of buffers, which a forward beside the copy may change. Raises StateCodecError.
    """
    new = state_codec.allocate(manifest)
    try:
        places = _places(json.loads(own_manifest), json.loads(manifest))
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise state_codec.MalformedManifest(f"the state's manifest is not one of ours: {error}") from error
    # not `detach`: a forward that runs beside the copy must not see its version change
    return [own[places[i]].data if i in places else new[i] for i in range(len(new))]


def _places(ours: Any, theirs: Any) -> dict[int, int]:
    """Returns which tensor of `theirs` may be written into which of `ours`, by the two manifests."""
    places: dict[int, int] = {}
    taken: set[int] = set()
    for here, there in _pairs(ours["state"], theirs["state"]):
        alike = ours["tensors"][here] == theirs["tensors"][there]
        # one memory under two names there may be two here; each place is written once
        if alike and there not in places and here not in taken:
            places[there] = here
            taken.add(here)
    return places


def _pairs(ours: Any, theirs: Any) -> list[tuple[int, int]]:
    """Returns (tensor here, tensor there) for tensors of parameters and optimizers in the same place of both trees."""
    here, there = value_tree.by_path(ours, "tensor"), value_tree.by_path(theirs, "tensor")
    return [(here[path], there[path]) for path in here.keys() & there.keys() if _may_be_live(path)]


def _may_be_live(path: tuple[str, ...]) -> bool:
    if not path or path[0] not in ("'modules'", "'optimizers'"):
        return False
    return path[0] == "'optimizers'" or path[-1].startswith("'parameter.")
