"""Says which kernels serve a process that imports them from the checkout in its argument, and a sum that they compute.

Torch may be loaded already, and so may the kernels of another checkout, which go.
"""

from __future__ import annotations

import sys

import torch

if __name__ == "__main__":
    for name in [name for name in sys.modules if name.partition(".")[0] == "bagua_core"]:
        del sys.modules[name]
    sys.path.insert(0, sys.argv[1])
    from bagua_core import kernels

    assert str(kernels.__file__).startswith(sys.argv[1]), kernels.__file__
    compressed = kernels.minmax_compress(torch.arange(100.0))
    target = kernels.target()
    print(f"{target.name}|{target.reason}|{compressed.sum()}")
