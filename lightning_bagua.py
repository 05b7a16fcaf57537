"""The name under which the original documentation has BaguaStrategy: `from lightning_bagua import BaguaStrategy`.

Importing it makes `Trainer(strategy="bagua")` known to Lightning.
"""

from bagua_core.integrations.lightning import BaguaStrategy

__all__ = ["BaguaStrategy"]
