"""What this integration knows of JAX: the versions that it was tested with, and the names that are not public.

A name that is missing is refused with a clear error where it is needed, not at import.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final

import jax

from tenuto.errors import StateError
from tenuto.events import warn

TESTED: Final = ((0, 9), (0, 10))
"""The oldest and the newest minor version of JAX in the tests."""

_PRIVATE: Final = {
    "registry": ("jax._src.tree_util", "_registry"),
    "convert": ("jax._src.lax.lax", "_convert_element_type"),
    "initialised": ("jax._src.xla_bridge", "backends_are_initialized"),
}
"""registry: the types that are registered as pytrees; the public registry can only be asked about values.
convert: gives an array a weak type.
initialised: whether the program uses JAX, and has not only imported it; asking for a device would take its memory."""


@cache
def private(name: str) -> Any:
    """Returns what a private name of JAX stands for. Raises StateError where this version has none."""
    module, attribute = _PRIVATE[name]
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        raise StateError(
            f"jax {jax.__version__} has no {module}.{attribute}, which Tenuto needs",
            subject="jax",
            hint=f"pip install 'jax<0.{TESTED[1][1] + 1}'",
        ) from None


def check_version() -> None:
    """Warns, once for the process, about a version of JAX outside those that were tested."""
    found = jax.__version_info__[:2]
    if not TESTED[0] <= found <= TESTED[1]:
        low, high = (".".join(map(str, one)) for one in TESTED)
        side = "newer" if found > TESTED[1] else "older"
        warn(f"jax {jax.__version__} is {side} than what Tenuto was tested with, {low} to {high}")
