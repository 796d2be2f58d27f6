"""Opens a store from what a user writes (`where`): a path, a URL, or a store."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import unquote, urlsplit

from tenuto.errors import MissingExtra, NotARepository, UsageError, install, typed
from tenuto.store.contract import Store, Where
from tenuto.store.local.store import LocalStore
from tenuto.store.memory import MemoryStore
from tenuto.store.probes import tuned
from tenuto.store.wrappers.retry import Patience, RetryingStore
from tenuto.telemetry.heartbeat import CHAOS

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)
_OBJECTS: Final = "tenuto.store.objects.urls"
_BACKENDS: Final[Mapping[str, tuple[str, str]]] = {
    "s3": (_OBJECTS, "s3"),
    "gs": (_OBJECTS, "gcs"),
    "gcs": (_OBJECTS, "gcs"),
    "az": (_OBJECTS, "azure"),
    "abfs": (_OBJECTS, "azure"),
    "abfss": (_OBJECTS, "azure"),
    "http": (_OBJECTS, "http"),
    "https": (_OBJECTS, "http"),
    "hdfs": ("tenuto.store.hdfs", "hdfs"),
}
"""The module that serves a scheme, by a function `open_url` from URL to Store, and the extra with what it needs."""
_FSSPEC: Final = "tenuto.store.fsspec"
_FSSPEC_PREFIX: Final = "fsspec+"
_REMOTE: Final = Patience(attempts=8)
"""A service that restarts, or asks for fewer requests, needs seconds: 11 s in all."""
CERTIFY_VARIABLE: Final = "TENUTO_CERTIFY"
"""The environment variable by which `tenuto certify` replaces the store that a script names (see `certify/probe`)."""
GROUP: Final = "tenuto.stores"
"""The entry points that serve further schemes: the name is the scheme, the object a callable from URL to Store."""


def open_store(where: Where) -> Store:
    """Opens the store of `where`, without touching it.

    A path or file:// URL is a local directory, memory://NAME a place in the memory of this process, and
    stripe://PLACE,PLACE several places as one; other schemes are served by entry points of the group `tenuto.stores`,
    and by fsspec. All are wrapped to retry transient faults. A Store is returned unchanged: its maker chooses the
    wrappers. Raises NotARepository for a file, UsageError for anything else.
    """
    if isinstance(where, Store) or hasattr(where, "put_if_absent"):
        return cast(Store, where)  # from Python 3.12 on a wrapper whose __getattr__ passes all on is no instance
    if os.environ.get(CHAOS):
        from tenuto.store.wrappers.struck import StruckStore

        return StruckStore(_opened(where))
    return _opened(where)


def _opened(where: str | os.PathLike[str]) -> Store:
    text = os.fspath(where) if isinstance(where, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        what = (
            repr(where) if isinstance(where, str | bytes | os.PathLike) else f"an object of type {type(where).__name__}"
        )
        state_first = "; the state comes first, then the location" if isinstance(where, Mapping) else ""
        raise UsageError(
            f"{what} is not a location for checkpoints: give a directory or a URL",
            subject=what,
            hint=f"write /the/path, file:///the/path or memory://NAME{state_first}",
        )
    found = _SCHEME.match(text)
    if found is None:
        _check_slashes(text)
        return RetryingStore(_local(text))
    scheme = found[1].lower()
    if scheme == "file":
        return RetryingStore(_local(_path_of(text)))
    if scheme == "memory":
        return RetryingStore(MemoryStore(_memory_name(text)))
    if scheme == "stripe":
        return _stripe(text)
    if scheme in _BACKENDS:
        return RetryingStore(tuned(_backend(scheme).open_url(text)), _REMOTE)
    return _further(scheme, text)


def _check_slashes(path: str) -> None:
    """Refuses a URL with too few slashes: it would be a directory of that name."""
    scheme, colon, rest = path.partition(":")
    if colon and scheme.lower() in _BACKENDS:
        raise UsageError(
            f"{path} is neither a URL nor likely to be a directory",
            subject=path,
            hint=f"write {scheme}://{rest.lstrip('/')}, or ./{path} for a directory of that name",
        )


def _stripe(url: str) -> Store:
    """Opens stripe://PLACE,PLACE,…. Not wrapped: each of its places retries for itself."""
    from tenuto.store.wrappers.stripe import Stripe

    return Stripe(*url.partition("://")[2].split(","))


def _backend(scheme: str) -> Any:
    """Returns the module that serves a scheme. Raises MissingExtra."""
    module, extra = _BACKENDS.get(scheme, (_FSSPEC, "fsspec"))
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("tenuto"):
            raise
        raise MissingExtra(
            f"{scheme}:// needs the package {error.name}, which is not installed",
            subject=f"{scheme}://",
            hint=install(extra),
        ) from None


def _local(path: str) -> LocalStore:
    # Symbolic links on the way to the root are the user's choice; inside a repository none is followed.
    try:
        root = os.path.realpath(os.path.expanduser(path))
    except FileNotFoundError:
        raise UsageError(
            f"{path} is relative to the working directory, which has been removed",
            subject=path,
            hint="give an absolute path, or cd to a directory that exists",
        ) from None
    try:
        is_directory = stat.S_ISDIR(os.stat(root).st_mode)
    except NotADirectoryError:
        is_directory = False
    except OSError:
        is_directory = True  # nothing is there yet, or whoever reads it says what is wrong
    if not is_directory:
        around = next((up for up in Path(root).parents if (up / "tenuto.json").is_file()), None)
        raise NotARepository(
            f"{path} is a file, or lies below one; a repository is a directory",
            subject=path,
            hint=typed("tenuto", "ls", around) if around is not None else "give the directory that training saves to",
        )
    return LocalStore(root)


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not path or "\0" in path:
        raise UsageError(
            f"{url} names no directory of this machine",
            subject=url,
            hint="write file:///the/path, or just the path",
        )
    return path


def _memory_name(url: str) -> str:
    name = url.partition("://")[2].strip("/")
    if not name:
        raise UsageError(f"{url} has no name", subject=url, hint="write memory://NAME")
    return name


def _further(scheme: str, url: str) -> Store:
    """Opens the store of a scheme that is none of ours: by an entry point, else by fsspec if it knows the scheme."""
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    for point in entry_points(group=GROUP):
        if point.name.lower() == scheme:
            factory: Callable[[str], Store] = point.load()
            return RetryingStore(factory(url))
    if scheme.startswith(_FSSPEC_PREFIX) or (find_spec("fsspec") and _backend(scheme).knows(scheme)):
        return RetryingStore(tuned(_backend(scheme).open_url(url)), _REMOTE)
    raise UsageError(
        f"no store serves {scheme}://",
        subject=url,
        hint=f"use a directory (also a mounted one), or a package with an entry point in {GROUP!r}; fsspec knows more",
    )


# --------------------------------------------------------------------------------------------------
# The store that a script names, under `tenuto certify`: a scratch store instead, so that the real one stays as it is.


def redirected(where: Where) -> Where:
    """Returns `where`, or under `tenuto certify` the scratch store that replaces it."""
    order = certify_order()
    return order["scratch"] if order is not None and same_store(where, order["where"]) else where


def is_scratch(store: Store) -> bool:
    """Returns whether `tenuto certify` has put this store in the place of the one that the script names."""
    order = certify_order()
    return order is not None and same_store(store, order["scratch"])


def same_store(one: Where, other: Where) -> bool:
    """Returns whether both name one store. Opening touches nothing."""
    return open_store(one).url.rstrip("/") == open_store(other).url.rstrip("/")


def certify_order(environment: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """Returns what `tenuto certify` has ordered for this process, as JSON with at least `where` and `scratch`; None
    outside of it. Raises UsageError if it cannot be parsed."""
    text = (os.environ if environment is None else environment).get(CERTIFY_VARIABLE)
    if not text:
        return None
    try:
        found: dict[str, Any] = json.loads(text)
        if isinstance(found["where"], str) and isinstance(found["scratch"], str):
            return found
        raise ValueError("where and scratch are not paths")
    except (ValueError, TypeError, KeyError) as error:
        raise broken_order(error) from None


def broken_order(error: Exception) -> UsageError:
    return UsageError(
        f"{CERTIFY_VARIABLE} is set and says nothing that can be understood: {error}",
        subject=CERTIFY_VARIABLE,
        hint=f"unset {CERTIFY_VARIABLE}: only `tenuto certify` sets it, for what it runs",
    )
