"""The worker's runner: brings the interpreter up, waits at the gate, then *is* `python script.py`.

Started by the agent as `python -u run_script.py [options] script args...`. Owns everything between the first
instruction of a worker and the end of the script; what follows is script_end.py's. The script must not be able to
tell: it runs as the real `__main__`, and no frame of this file appears in what it prints. Knows nothing of
generations; `bagua_core.elastic.step.runtime` is notified of the end only if the script has imported it.

Options, before the script: --module | --run-path, --parent-pid N; and --warm-fd N with --preimport a,b,c, with which
this process is not a worker but forks them on request, imports done: see warm_parent.py. A process that runs the script
itself imports nothing ahead: the script may first set what libraries read when they are loaded.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

GATE_VARIABLE = "BAGUA_GATE_FD"
ERROR_FILE_VARIABLES = ("TORCHELASTIC_ERROR_FILE", "BAGUA_ERROR_FILE")
SHARDS_VARIABLE = "BAGUA_VIRTUAL_SHARDS"
RUNTIME_MODULE = "bagua_core.elastic.step.runtime"

# Imports of the standard library stand inside functions: at this point sys.path[0] is still the
# directory of this file, whose modules would shadow others of the same name.


class _Options(NamedTuple):
    form: str
    target: str
    arguments: list[str]
    parent_pid: int | None
    preimport: str
    warm_fd: int | None


def main(arguments: list[str], loaded_before: set[str] | None = None) -> None:
    """Runs the script, or becomes the warm parent of workers that do. loaded_before: names of modules that were loaded
    before anything was imported ahead, in a warm parent that was forked with its imports done; its sys.path has no
    runner."""
    options = _parse(arguments)
    if loaded_before is None:
        _remove_runner_from_path()
    if options.parent_pid is not None:
        _die_with(options.parent_pid)
    path = list(sys.path)
    bring_back: Callable[[], object] = bool  # does nothing
    run = _prepare(options.form, options.target, options.arguments)
    if options.warm_fd is None:
        _sibling("stack_dump").answer_stack_requests()
    else:
        # What follows happens in forked workers only
        command, bring_back = _become_warm_parent(options, loaded_before)
        # not before: workers must not share one file
        _sibling("stack_dump").answer_stack_requests()
        if options.parent_pid is not None:
            _die_with(options.parent_pid)
        sys.path[:] = path
        # Once more in any case: the module of a frozen heap (gc.freeze) would not be collected at the end.
        run = _prepare(*(command or (options.form, options.target, options.arguments)))
    end = _sibling("script_end")  # now, for the script may change how modules are found
    _pass_gate()
    outcome = _run_to_end(run if os.environ.get(SHARDS_VARIABLE, "0") == "0" else _deterministic(run))
    bring_back()
    end.finish(outcome, sys.modules.get(RUNTIME_MODULE))


def _parse(arguments: list[str]) -> _Options:
    form, parent_pid, preimport, warm_fd = "script", None, "", None
    rest = list(arguments)
    while rest and rest[0].startswith("--"):
        option = rest.pop(0)
        if option in ("--module", "--run-path"):
            form = option[2:]
        elif option == "--parent-pid":
            parent_pid = int(rest.pop(0))
        elif option == "--preimport":
            preimport = rest.pop(0)
        elif option == "--warm-fd":
            warm_fd = int(rest.pop(0))
        elif option == "--":
            break
        else:
            raise SystemExit(f"run_script: unknown option {option}")
    if not rest:
        raise SystemExit("run_script: no script given; this file is started by bagua-launch")
    return _Options(form, rest[0], rest[1:], parent_pid, preimport, warm_fd)


def _become_warm_parent(
    options: _Options, loaded_before: set[str] | None
) -> tuple[tuple[str, str, list[str]] | None, Callable[[], None]]:
    """Becomes a warm parent. Returns in forked workers only: the command, None for the one of the command line; and
    what brings back the modules that are hidden from the script until it imports them (fresh_start.py)."""
    assert options.warm_fd is not None
    import gc

    printed = _capture_output()
    before = set(sys.modules) if loaded_before is None else loaded_before
    gc.disable()  # what is imported stays; looking for garbage in it takes a tenth of a second
    _import_ahead(options.preimport)
    gc.enable()
    # After the imports, and by path: the script's directory decides what `import json` means, as ever.
    fresh_start = _sibling("fresh_start")
    ahead = fresh_start.loaded_since(before)
    request = _sibling("warm_parent").serve(options.warm_fd, printed(), _sibling("forked_identity"))
    return request.get("command"), fresh_start.hide(ahead, request)


def _capture_output() -> Callable[[], tuple[bytes, bytes]]:
    """Captures what imports print, which belongs to every worker's own streams. Returns what ends this and returns the
    output."""
    files = [os.memfd_create(f"printed-{number}") for number in (1, 2)]
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)

    def end() -> tuple[bytes, bytes]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        kept = []
        for number, file in zip((1, 2), files, strict=True):
            os.dup2(nowhere, number)
            kept.append(os.pread(file, os.fstat(file).st_size, 0))
            os.close(file)
        os.close(nowhere)
        return kept[0], kept[1]

    return end


def _sibling(name: str) -> Any:
    """Loads a module beside this file, without its package, whose import would bring torch in."""
    from importlib.util import module_from_spec, spec_from_file_location

    path = os.path.join(os.path.dirname(_sibling.__code__.co_filename), name + ".py")
    spec = spec_from_file_location("_bagua_" + name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _remove_runner_from_path() -> None:
    if not sys.flags.safe_path:
        del sys.path[0]


def _die_with(parent_pid: int) -> None:
    """Has the kernel send SIGKILL to this process when the thread of the agent that started it ends."""
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(0)


# -- being `python script.py`


def _prepare(form: str, target: str, arguments: list[str]) -> Callable[[], None]:
    """Gives the interpreter the face it would have without this file; returns what runs the script."""
    _replace_main_module()
    if form == "module":
        sys.orig_argv[1:] = ["-u", "-m", target, *arguments]
        sys.argv[:] = ["-m", *arguments]
        _insert_path(os.getcwd())
        return lambda: _run_module(target)
    sys.orig_argv[1:] = ["-u", target, *arguments]
    sys.argv[:] = [target, *arguments]
    if form == "run-path":
        return lambda: _run_path(target)
    path = _absolute(target)
    if _is_application(path):
        _insert_path(path)
        return _run_application
    _insert_path(os.path.dirname(os.path.realpath(path)))
    return lambda: _run_file(path)


def _replace_main_module() -> None:
    # A new module, because the functions of this file live in the namespace of the present one.
    former = sys.modules["__main__"]
    present = former.__dict__
    module = ModuleType("__main__")
    namespace = module.__dict__
    if "__annotations__" in present:
        namespace["__annotations__"] = {}
    namespace["__builtins__"] = builtins
    for name in [name for name, known in sys.modules.items() if known is former]:
        sys.modules[name] = module  # __main__, and __mp_main__ once multiprocessing is imported


def _insert_path(directory: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, directory)


def _absolute(path: str) -> str:
    """Returns the absolute path as the interpreter makes it: without normalisation."""
    return os.path.join(os.getcwd(), path)


def _is_application(path: str) -> bool:
    """Tells whether `path` is a directory or zip file with a __main__.py."""
    import pkgutil

    return pkgutil.get_importer(path) is not None


def _deterministic(run: Callable[[], None]) -> Callable[[], None]:
    """Returns what runs the script of a deterministic job: torch is imported before it, with the job's settings and
    random state."""

    def run_seeded() -> None:
        from bagua_core.elastic.step import deterministic_worker

        deterministic_worker.use_deterministic_kernels()
        deterministic_worker.seed_before_script()
        run()

    return run_seeded


def _run_file(path: str) -> None:
    code = _code_of(path)
    namespace = sys.modules["__main__"].__dict__
    exec(code, namespace)


def _code_of(path: str) -> CodeType:
    import io
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    namespace = sys.modules["__main__"].__dict__
    namespace["__file__"] = path
    namespace["__cached__"] = None
    if path.endswith(".pyc"):
        loader = SourcelessFileLoader("__main__", path)
        namespace["__loader__"] = loader
        code = loader.get_code("__main__")
        assert isinstance(code, CodeType)
        return code
    namespace["__loader__"] = SourceFileLoader("__main__", path)
    try:
        _refuse_what_is_no_file(path)
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        problem = f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: {problem}\n")
        raise SystemExit(2) from None
    return compile(source, path, "exec", dont_inherit=True)


def _refuse_what_is_no_file(path: str) -> None:
    """Refuses what is neither a file nor a directory: a FIFO would be waited for without end, a device read without
    end. Raises OSError."""
    import errno
    import stat

    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is no ordinary file", path)


def _run_module(name: str) -> None:
    import runpy

    # What the interpreter itself calls for -m: its frames appear in tracebacks there too.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_application() -> None:
    import runpy

    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def _run_path(path: str) -> None:
    import runpy

    _refuse_what_is_no_file(path)
    runpy.run_path(path, run_name="__main__")


# -- before the script


def _import_ahead(names: str) -> None:
    """Imports what takes long, before there is a worker. What cannot be imported is the script's affair."""
    import importlib

    for name in filter(None, names.split(",")):
        try:
            importlib.import_module(name)
        except (ImportError, OSError):
            # not installed, or a library of it is missing: the script's own import says so
            continue


def _pass_gate() -> None:
    """Waits for the agent's word. End-of-file means that it has no use for this worker."""
    gate = int(os.environ.get(GATE_VARIABLE, "-1"))
    if gate < 0:
        return
    word = os.read(gate, 1)
    os.close(gate)
    os.environ[GATE_VARIABLE] = "-1"  # the descriptor means nothing to children
    if word != b"g":
        os._exit(0)


# -- after the script


def _run_to_end(run: Callable[[], None]) -> BaseException | None:
    """Runs the script, and reports an uncaught exception as the interpreter would. Returns how to exit."""
    started_in = os.getpid()
    try:
        run()
    except SystemExit as ending:
        outcome: BaseException | None = ending
    except BaseException as error:  # noqa: BLE001 - everything the interpreter would report
        outcome = error
    else:
        outcome = None
    in_worker = os.getpid() == started_in  # a child that the script forked returns through here too
    if outcome is not None and not isinstance(outcome, SystemExit):
        if in_worker and isinstance(outcome, Exception) and (runtime := sys.modules.get(RUNTIME_MODULE)):
            runtime.script_failed(outcome)
        outcome = _uncaught(outcome, record=in_worker)
    if not in_worker:
        raise outcome or SystemExit(0)
    return outcome


def _uncaught(error: BaseException, record: bool) -> BaseException:
    trace = _without_runner(error.__traceback__)
    error.__traceback__ = trace
    if getattr(error, "bagua_is_orderly", False) or (record and _is_interrupt_of_leave(error)):
        return error  # the worker left as asked: nothing to report
    if record and not isinstance(error, KeyboardInterrupt):
        _write_error_file(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as ending:
        return ending
    except BaseException as hook_error:  # noqa: BLE001 - as the interpreter does
        hook_error.__traceback__ = _without_runner(hook_error.__traceback__)
        hook_error.__context__ = None  # the interpreter calls the hook outside of any handler
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(hook_error), hook_error, hook_error.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, trace)
    return error if isinstance(error, KeyboardInterrupt) else SystemExit(1)


def _is_interrupt_of_leave(error: BaseException) -> bool:
    """Tells whether the runtime has left the job in the script's place, and interrupted the script."""
    runtime = sys.modules.get(RUNTIME_MODULE)
    return isinstance(error, KeyboardInterrupt) and runtime is not None and bool(runtime.has_left())


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    mine = _without_runner.__code__.co_filename
    while trace is not None and trace.tb_frame.f_code.co_filename == mine:
        trace = trace.tb_next
    return trace


def _write_error_file(error: BaseException) -> None:
    """Writes the file that torch's `@record` writes, for scripts without it; never over one that says something."""
    path = next((value for name in ERROR_FILE_VARIABLES if (value := os.environ.get(name))), None)
    if path is None:
        return
    import json
    import time
    import traceback

    try:
        text = f"{type(error).__name__}: {error}"
    except Exception as unprintable:  # noqa: BLE001 - the user's code may raise anything
        text = f"{type(error).__name__}: <its str() raised {type(unprintable).__name__}>"
    callstack = "".join(traceback.format_exception(error))
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    content = json.dumps({"message": {"message": text, "extraInfo": extra}})
    try:
        with open(path, "a") as file:  # an empty one may have been made for us, where we may make none
            if file.tell() == 0:
                file.write(content)
    except OSError as problem:
        sys.stderr.write(f"bagua: could not write the error file {path}: {problem}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
