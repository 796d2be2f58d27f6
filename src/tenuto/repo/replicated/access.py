"""What is asked of a store by those who do not care whether it is one place or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tenuto.repo.replicated.replica import UnreachableReplica, holds
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.store.contract import Store


def home_of(store: Store) -> Store:
    """Returns the place that decides which objects but packs there are."""
    return store.home if isinstance(store, ReplicatedStore) else store


def copies_of(store: Store, name: str) -> list[Store]:
    """The places that have a copy of an object."""
    order = store.order(name) if isinstance(store, ReplicatedStore) else [store]
    return [one for one in order if holds(one, name)]


def away(store: Store) -> Sequence[UnreachableReplica]:
    """The places of the repository that are not found from here."""
    return store.away() if isinstance(store, ReplicatedStore) else ()


def elsewhere(store: Store) -> str:
    """What is said of a pack that is in no place of several: it may be in one that is not found."""
    places = away(store)
    if places:
        shown = ", ".join(map(str, places[:3]))
        return f"is not found from here: it may be on {shown}{', …' if len(places) > 3 else ''}"
    return "is missing: it is in none of the repository's places" if isinstance(store, ReplicatedStore) else ""


def room(store: Store) -> tuple[str, int | None]:
    """Where packs have to fit, and how many bytes are free there."""
    return store.tightest() if isinstance(store, ReplicatedStore) else (store.url, store.free_bytes())


def turn_away(store: Store, name: str) -> bool:
    """As `Places.turn_away`; a store that is one place has one copy."""
    return isinstance(store, ReplicatedStore) and store.turn_away(name)


def listen(store: Store, tell: Callable[[str], None]) -> None:
    """`tell` is called with what goes wrong in one of several places, and would be a warning otherwise."""
    if isinstance(store, ReplicatedStore):
        store.tell = tell


@contextmanager
def listening(store: Store, tell: Callable[[str], None]) -> Iterator[None]:
    """As `listen`, within the block."""
    before = store.tell if isinstance(store, ReplicatedStore) else tell
    listen(store, tell)
    try:
        yield
    finally:
        listen(store, before)
