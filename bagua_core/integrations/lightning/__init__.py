"""Runs Lightning's Trainer as an elastic job: `Trainer(strategy=BaguaStrategy(algorithm="bytegrad"))`.

See docs/lightning.md. Importing this package also registers the name, so that `Trainer(strategy="bagua")` works.
"""

from __future__ import annotations

from bagua_core.integrations.lightning.strategy import BaguaStrategy, register

register()

__all__ = ["BaguaStrategy"]
