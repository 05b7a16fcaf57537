"""Keeps what a warm parent imported for a forked worker alive until the worker's process has ended.

The interpreter destroys all modules at its end. A forked worker shares the memory of the modules that were imported for
it, so destroying them first copies much of it: 70 MiB, which takes 80 ms of a processor. What the script made is
destroyed as ever: its own modules, and those of Bagua, which refer to its objects.

Loaded by path (run_script.py), so it imports only the standard library.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
from types import ModuleType

_OURS = ("bagua_core", "bagua_contract")


class KeptImports:
    """Makes modules outlive the interpreter of a forked worker, once `keep` has named them.

    To be made before anything is imported ahead: exit functions are called last first, and the others may import.
    """

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        atexit.register(self._take_out)

    def keep(self, names: set[str]) -> None:
        """Keeps those of the loaded modules `names` that are not Bagua's."""
        self._modules = {name: sys.modules[name] for name in names if name.partition(".")[0] not in _OURS}

    def _take_out(self) -> None:
        """Takes the modules away from the interpreter, which destroys what sys.modules names."""
        if _nanobind_is_loaded():
            gc.unfreeze()
            return
        if gc.isenabled():
            gc.collect()  # as the interpreter does while its modules can still be imported
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._modules))
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                # not deleted: an import from a destructor fails then, as at any interpreter's end
                sys.modules[name] = None  # type: ignore[assignment]


def _nanobind_is_loaded() -> bool:
    """Tells whether extensions made with nanobind are loaded, as Triton is from 3.9 on: nanobind prints a hundred lines
    about objects that it finds alive at the end. There the interpreter's last collection takes what the warm parent
    froze, and all modules are destroyed."""
    return any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type))
