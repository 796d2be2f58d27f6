"""What `tenuto probe` found about places, kept in the user's cache directory: one small file for each URL."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Final

from tenuto.store.contract import Capabilities, Store
from tenuto.store.wrappers.delegating import DelegatingStore

_LIMIT: Final = 1 << 20
_MOST_PART: Final = 1 << 30
_MOST_PARALLEL: Final = 1024


def path_of(url: str) -> Path:
    """Returns where the probe of a place is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "tenuto" / "probes" / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"


def keep(url: str, found: dict[str, Any]) -> Path:
    """Keeps what was found instead of what was kept before. Raises OSError."""
    path = path_of(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_text(json.dumps({"url": url, **found}))
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    return path


def kept(url: str) -> dict[str, Any] | None:
    """Returns what was found about a place; None if nothing is kept, or it is damaged: a place works without."""
    try:
        with path_of(url).open("rb") as file:
            found = json.loads(file.read(_LIMIT))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("url") == url else None


def read_rate(url: str) -> float | None:
    """Returns the bytes per second that a kept probe has read at most from a place; None if nothing is known."""
    cells = (kept(url) or {}).get("cells")
    rates = [cell.get("get") for cell in cells if isinstance(cell, dict)] if isinstance(cells, list) else []
    return max((float(rate) for rate in rates if isinstance(rate, int | float) and 0 < rate < inf), default=None)


@dataclass(eq=False)
class TunedStore(DelegatingStore):
    """A store that is read as was found to be fastest."""

    part_bytes: int
    parallel: int

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, part_bytes=self.part_bytes, parallel=self.parallel)


def tuned(store: Store) -> Store:
    """Returns the store, read by the length and the number of requests that a kept probe found best."""
    found = kept(store.url) or {}
    part, parallel = found.get("part_bytes"), found.get("parallel")
    if not (isinstance(part, int) and isinstance(parallel, int)):
        return store
    if not (0 < part <= _MOST_PART and 0 < parallel <= _MOST_PARALLEL):
        return store
    return TunedStore(store, part, parallel)
