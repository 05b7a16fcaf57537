"""Lets a forked worker's script decide the environment that torch is loaded with.

A worker is forked with torch loaded. `hide` takes what was imported ahead out of sys.modules; an import brings it back,
unless the script has changed a variable that a library reads when it is loaded. Then the process executes a fresh
interpreter, which runs the script again from its first line with the environment of that moment. Its process id, its
parent and its streams stay. No session is open by then, for opening one needs a module that is hidden.

Loaded by path (run_script.py), so it imports only the standard library.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import signal
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STACKS_VARIABLE = "BAGUA_STACK_FDS"
LEAST_DESCRIPTOR = 200  # scripts count on low numbers being free
# Importing one of these loads torch; any other package that was imported ahead is brought back alone.
_BRING_TORCH = ("torch", "functorch", "torchgen", "bagua_core")


def loaded_since(before: set[str]) -> set[str]:
    """Returns the names of loaded modules that are neither in `before` nor of the standard library.

    Without those that no import statement has brought, such as Cython's: extensions look for them in sys.modules.
    """
    known = sys.stdlib_module_names | {"__main__", "__mp_main__"}
    packages = {name.partition(".")[0] for name in set(sys.modules) - before} - known
    found = {p for p in packages if getattr(sys.modules.get(p), "__spec__", None) is not None}
    return {name for name in set(sys.modules) - before if name.partition(".")[0] in found}


def hide(names: set[str], request: dict[str, Any]) -> Callable[[], None]:
    """Hides the modules `names`. Returns what brings everything back without looking at the environment: to be called
    when the script has ended.

    request: line, the command line of a fresh start; read_at_load and read_later, patterns of variables.
    Called before the stack channel is taken (stack_dump.py).
    """
    ahead = _Ahead({name: sys.modules.pop(name) for name in names}, _Start(request))
    sys.meta_path.insert(0, ahead)
    return ahead.bring_all_back


class _Start:
    """Holds what the process was started with."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._line: list[str] = request["line"]
        self._read_at_load, self._read_later = request["read_at_load"], request["read_later"]
        self._interpreter = sys.executable
        self._pid = os.getpid()
        self._variables = self._library_variables()
        self._signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        directory = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._directory = _copied(directory)
        os.close(directory)
        self._streams = [_copied(number) for number in range(3)]
        stacks = os.environ.get(STACKS_VARIABLE)
        self._stacks = [_copied(int(number)) for number in stacks.split(",")] if stacks else []

    def _library_variables(self) -> dict[str, str]:
        return {
            name: value
            for name, value in os.environ.items()
            if name not in self._read_later
            and any(fnmatch.fnmatchcase(name, pattern) for pattern in self._read_at_load)
        }

    def changed_variables(self) -> list[str]:
        """Returns the variables of libraries that have changed since. Empty in children that the script forked: such a
        child is not the worker."""
        if os.getpid() != self._pid:
            return []
        now = self._library_variables()
        return sorted(n for n in now.keys() | self._variables.keys() if now.get(n) != self._variables.get(n))

    def again(self, variables: list[str], package: str) -> None:
        """Executes a fresh interpreter. Returns only if that is not possible, having said so."""
        names = ", ".join(variables)
        self._say(
            f"the script set {names} before its first import of {package}; it starts again in a fresh interpreter"
        )
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue  # closed by the script, or its reader is gone
        environment = dict(os.environ)
        try:
            os.fchdir(self._directory)
            for number, copy in enumerate(self._streams):
                os.dup2(copy, number)
            if self._stacks:
                os.ftruncate(self._stacks[0], 0)  # the fresh process writes the channel's first line again
                for copy in self._stacks:
                    os.set_inheritable(copy, True)
                environment[STACKS_VARIABLE] = ",".join(map(str, self._stacks))
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._signal_mask)
            os.execve(self._interpreter, self._line, environment)
        except OSError as problem:
            self._say(f"it can't start again ({problem}), so {names} may not count; use --start-method spawn")

    def _say(self, text: str) -> None:
        try:
            os.write(self._streams[2], f"bagua: {text}\n".encode(errors="replace"))
        except OSError:
            return  # its reader is gone

    def close(self) -> None:
        for descriptor in (self._directory, *self._streams, *self._stacks):
            os.close(descriptor)


class _Ahead:
    """A finder of hidden modules. Finding one changes nothing, as with any other module; loading it brings it back."""

    def __init__(self, hidden: dict[str, ModuleType], start: _Start) -> None:
        self._hidden = hidden
        self._start = start

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = self._hidden.get(name)
        if module is None:
            return None
        real = module.__spec__
        spec = ModuleSpec(name, _Hidden(self, module, real), origin=real.origin if real else None)  # type: ignore[arg-type]
        if real is not None:
            spec.submodule_search_locations = real.submodule_search_locations
            spec.has_location = real.has_location
            spec.cached = real.cached
        return spec

    def bring_back(self, name: str) -> None:
        package = name.partition(".")[0]
        changed = self._start.changed_variables()
        if changed:
            self._start.again(changed, package)
        if package in _BRING_TORCH:
            self.bring_all_back()
            return
        for each in [n for n in self._hidden if n.partition(".")[0] == package]:
            sys.modules[each] = self._hidden.pop(each)

    def bring_all_back(self) -> None:
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        for name, module in self._hidden.items():
            sys.modules.setdefault(name, module)
        self._hidden.clear()
        self._start.close()


class _Hidden:
    """The loader of one hidden module: its own loader, but for bringing it back instead of executing it."""

    def __init__(self, ahead: _Ahead, module: ModuleType, spec: ModuleSpec | None) -> None:
        self._ahead, self._module, self._spec = ahead, module, spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec.loader if self._spec is not None else None, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._ahead.bring_back(spec.name)
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _copied(number: int) -> int:
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR)
    except OSError:
        return os.dup(number)  # fewer descriptors are allowed than that
