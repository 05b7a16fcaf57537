"""Defines the base classes of algorithms, for scripts that name one or write their own.

Owns the two base classes, and ScriptModel, the model as hooks get it. A declaration (`Algorithm`) holds arguments;
`reify` makes of it the `AlgorithmImpl` of one model, whose hooks say what happens to the gradients in a bucket. The
runtime's own algorithms are declarations too, but run as bagua_core/algorithms; only what a script writes is run
through its hooks (own.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from bagua_core import algorithms as core
from bagua_core.torch_api.bucket import BaguaBucket
from bagua_core.torch_api.errors import UnsupportedAlgorithmError
from bagua_core.torch_api.process_group import BaguaProcessGroup

__all__ = ["Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry"]

THE_RUNTIMES = ("init_tensors", "tensors_to_buckets", "init_backward_hook")


class AlgorithmImpl:
    """An algorithm's implementation for one model. A script's own overrides `init_operations` and the hooks it needs.

    `init_tensors`, `tensors_to_buckets` and `init_backward_hook` are the runtime's: what is shared is the gradients,
    in buckets that fill in the order of the backward. process_group: the group of all workers.
    """

    def __init__(self, process_group: BaguaProcessGroup) -> None:
        self.process_group = process_group

    def need_reset(self) -> bool:
        """Tells whether init_operations is to be called anew; called once a step, before its first forward."""
        return False

    def init_tensors(self, bagua_ddp: ScriptModel) -> Any:
        """Belongs to the runtime and must not be overridden."""
        raise NotImplementedError

    def tensors_to_buckets(self, tensors: Any, do_flatten: bool) -> Any:
        """Belongs to the runtime and must not be overridden."""
        raise NotImplementedError

    def init_backward_hook(self, bagua_ddp: ScriptModel) -> Any:
        """Belongs to the runtime and must not be overridden."""
        raise NotImplementedError

    def init_operations(self, bagua_ddp: ScriptModel, bucket: BaguaBucket) -> None:
        """Appends the operations on the gradients in `bucket` to it, in the order in which they are to run."""
        raise NotImplementedError(f"{type(self).__name__} has no init_operations, so nothing would be shared")

    def init_forward_pre_hook(self, bagua_ddp: ScriptModel) -> Callable[[Any], None]:
        """Returns the function called before each training forward, with the model's positional inputs."""
        return _ignore

    def init_post_backward_hook(self, bagua_ddp: ScriptModel) -> Callable[[], None]:
        """Returns the function called when all gradients are there and the step can't fail any more."""
        return _ignore

    def init_post_optimizer_step_hook(
        self, bagua_ddp: ScriptModel
    ) -> Callable[[torch.optim.Optimizer], None]:
        """Returns the function called after an optimizer has stepped, with the optimizer."""
        return _ignore


def _ignore(*_: Any) -> None:
    return None


class Algorithm:
    """The declaration of an algorithm; one may be given to several models. A script's own overrides `reify`."""

    equal_states: bool = True
    """Whether all workers hold the same parameters after each step. A script's own algorithm that lets them differ says
    False, or the comparison of digests stops the job."""

    _registered: ClassVar[dict[str, Callable[..., Algorithm]]] = {}

    def reify(self, process_group: BaguaProcessGroup) -> AlgorithmImpl:
        """Returns a new implementation for one model. process_group: the group of all workers."""
        raise NotImplementedError(f"{type(self).__name__} has no reify")

    def core(self) -> core.Algorithm | None:
        """Returns the core's algorithm of the same meaning; None: the algorithm runs through its hooks."""
        return None

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """Returns the declaration registered under `name`, with these arguments. Raises UnknownAlgorithmError."""
        if name not in cls._registered:
            known = ", ".join(sorted(cls._registered))
            raise core.UnknownAlgorithmError(f"Algorithm.init({name!r}) is unknown; use one of {known}")
        return cls._registered[name](**kwargs)

    @classmethod
    def register(cls, name: str, declaration: Callable[..., Algorithm]) -> None:
        """Registers `declaration` under `name` for `init`. A name that is taken is replaced."""
        cls._registered[name] = declaration


class ScriptModel:
    """The model as the hooks of a script's own algorithm get it. Raises UnsupportedAlgorithmError."""

    def __init__(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], algorithm: Algorithm
    ) -> None:
        self.module = module
        self.bagua_optimizers = list(optimizers)
        self.process_group = BaguaProcessGroup()
        self.bagua_buckets: list[BaguaBucket] = []
        impl = algorithm.reify(self.process_group)
        _check(impl)
        self.impl = impl
        self.forward_pre_hook: Callable[[Any], None] = impl.init_forward_pre_hook(self)
        self.post_backward_hook: Callable[[], None] = impl.init_post_backward_hook(self)
        self.post_optimizer_step_hook: Callable[[torch.optim.Optimizer], None] = (
            impl.init_post_optimizer_step_hook(self)
        )

    def init_operations(self) -> None:
        """Makes the operations of all buckets anew. Raises UnsupportedAlgorithmError for a bucket without any."""
        for bucket in self.bagua_buckets:
            bucket.clear_ops()
            self.impl.init_operations(self, bucket)
            if not bucket.operations:
                raise UnsupportedAlgorithmError(
                    f"{type(self.impl).__name__}.init_operations appended nothing to bucket {bucket.name}, so its "
                    "gradients would not be shared"
                )


def _check(impl: AlgorithmImpl) -> None:
    for name in THE_RUNTIMES:
        if getattr(type(impl), name, None) is not getattr(AlgorithmImpl, name):
            raise UnsupportedAlgorithmError(
                f"{type(impl).__name__}.{name}: which tensors are shared, and in which buckets, is the runtime's "
                "affair here (gradients, as the backward produces them). Leave the method out, or write the "
                "algorithm for the core (docs/algorithms.md)"
            )


class _Registry:
    """Holds the algorithms that Algorithm.init finds, as the original's object of this name showed them."""

    def register(
        self, name: str, algorithm: Callable[..., Algorithm], description: str | None = None
    ) -> None:
        """Registers `algorithm` under `name`. Raises ValueError for a name that is taken; Algorithm.register replaces
        it."""
        if name in Algorithm._registered:
            raise ValueError(
                f"{name!r} is registered already; choose another name, or call Algorithm.register"
            )
        Algorithm.register(name, algorithm)

    def get(self, name: str) -> Callable[..., Algorithm]:
        """Returns the declaration registered under `name`. Raises KeyError."""
        if name not in Algorithm._registered:
            raise KeyError(f"{name!r} is unknown; use one of {', '.join(self.available_algorithms())}")
        return Algorithm._registered[name]

    def available_algorithms(self) -> list[str]:
        """Returns the registered names, in the order of their registration."""
        return list(Algorithm._registered)

    def __contains__(self, name: object) -> bool:
        return name in Algorithm._registered

    def __str__(self) -> str:
        return f"Registered Algorithms: {', '.join(self.available_algorithms())}"


GlobalAlgorithmRegistry = _Registry()
"""The algorithms that Algorithm.init finds: `register(name, algorithm)` refuses a name that is taken, `get(name)`
returns what was registered, `available_algorithms()` lists the names."""


class BuiltIn(Algorithm):
    """A declaration that the core knows. A subclass with a `reify` of its own is a script's own algorithm."""

    _core: core.Algorithm

    def core(self) -> core.Algorithm | None:
        return self._core

    def reify(self, process_group: BaguaProcessGroup) -> AlgorithmImpl:
        raise UnsupportedAlgorithmError(
            f"{type(self).__name__} has no hooks to build on: it runs as bagua_core.algorithms; an algorithm of one's "
            "own derives from Algorithm, or from the core's (docs/algorithms.md)"
        )


def is_own(algorithm: Algorithm) -> bool:
    """Tells whether `algorithm` is run through its hooks: its `reify` is not one of this package."""
    return not type(algorithm).reify.__module__.startswith("bagua_core.torch_api.")
