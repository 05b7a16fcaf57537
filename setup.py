"""Adds the compiled library of the CPU's kernels to what pyproject.toml says. Without a compiler the installation goes
on without it, and the kernels say so when they are first used."""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup

# By its path: importing bagua_core would need torch, and a build has none.
_file = Path(__file__).parent / "bagua_core" / "kernels" / "compilation.py"
_spec = importlib.util.spec_from_file_location("compilation", _file)
assert _spec is not None and _spec.loader is not None
compilation = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(compilation)

_root = Path(__file__).resolve().parent
setup(
    ext_modules=[
        Extension(
            "bagua_core.kernels._cpu",
            [str(compilation.SOURCE.relative_to(_root))],
            depends=[str(path.relative_to(_root)) for path in compilation.READ_BY_IT],
            define_macros=compilation.macros(),
            extra_compile_args=compilation.COMPILE_FLAGS,
            extra_link_args=compilation.LINK_FLAGS,
            optional=True,
        )
    ]
)
