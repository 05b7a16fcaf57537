"""BaguaTensor does not exist here; asking for it says what to use."""

from __future__ import annotations

from collections.abc import Callable

from bagua_core.torch_api.absent_names import absent_from

__getattr__: Callable[[str], object] = absent_from(__name__)
