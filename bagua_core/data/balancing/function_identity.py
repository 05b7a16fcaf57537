"""Is this the function whose results were kept? A digest of what a function is, for the name of a cache.

Owns nothing else: what the function reads beside its arguments, its code, defaults and closure (globals, files) is
not seen here; complexity_blocks.py looks at samples again for that.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable
from typing import Any


class UnknownFunction(ValueError):
    """What a callable does can't be told from it."""


def function_identity(function: Callable[..., Any]) -> str:
    """16 hexadecimal digits, equal for equal code, defaults and closures under one Python version.

    Raises UnknownFunction for callables that hide what they do (objects with __call__, methods of objects).
    """
    described = "\n".join(_described(function))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _described(value: Any) -> list[str]:
    if isinstance(value, functools.partial):
        inner = [_described(value.func), _described(value.args), _described(value.keywords)]
        return ["partial", *(line for part in inner for line in part)]
    if isinstance(value, types.FunctionType):
        closure = tuple(cell.cell_contents for cell in value.__closure__ or ())
        parts = (value.__code__, value.__defaults__, value.__kwdefaults__, closure)
        return ["function", *(line for part in parts for line in _described(part))]
    if isinstance(value, types.BuiltinFunctionType) and isinstance(
        value.__self__, (types.ModuleType, type(None))
    ):
        return [f"builtin {value.__module__}.{value.__qualname__}"]
    if isinstance(value, types.CodeType):
        return [value.co_code.hex(), repr(value.co_names), *_described(value.co_consts)]
    if isinstance(value, type) and value.__module__ == "builtins":
        return [f"type {value.__qualname__}"]
    if isinstance(value, (tuple, list)):
        return [
            f"{type(value).__name__} {len(value)}",
            *(line for item in value for line in _described(item)),
        ]
    if isinstance(value, (dict, frozenset, set)):
        # sets have no order, dictionaries one that means nothing here
        items = value.items() if isinstance(value, dict) else value
        lines = sorted("\n".join(_described(item)) for item in items)
        return [f"{type(value).__name__} {len(value)}", *lines]
    if value is None or value is ... or isinstance(value, (bool, int, float, complex, str, bytes)):
        return [f"{type(value).__name__} {value!r}"]
    raise UnknownFunction(f"a {type(value).__name__} ({value!r}) may do anything")
