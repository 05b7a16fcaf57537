"""Provides BaguaStrategy under the name of the original documentation: `from lightning_bagua import BaguaStrategy`.

Importing it makes `Trainer(strategy="bagua")` known to Lightning.
"""

from bagua_core.integrations.lightning import BaguaStrategy

__all__ = ["BaguaStrategy"]
