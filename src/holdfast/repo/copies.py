"""What is asked of a store by those who do not care whether it is one place or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from holdfast.repo.places import Places, holds
from holdfast.store.contract import Store


def copies_of(store: Store, name: str) -> list[Store]:
    """The places that have a copy of an object."""
    order = store.order(name) if isinstance(store, Places) else [store]
    return [one for one in order if holds(one, name)]


def away(store: Store) -> Sequence[str]:
    """The nodes that have places of the repository which are not found from here."""
    return store.away() if isinstance(store, Places) else ()


def elsewhere(store: Store) -> str:
    """What is said of a pack that is in no place of several: it may be on a node that is not this one."""
    nodes = away(store)
    if nodes:
        return f"is not found from here: it may be on {', '.join(nodes[:3])}{', …' if len(nodes) > 3 else ''}"
    return "is missing: it is in none of the repository's places" if isinstance(store, Places) else ""


def turn_away(store: Store, name: str) -> bool:
    """As `Places.turn_away`; a store that is one place has one copy."""
    return isinstance(store, Places) and store.turn_away(name)


def listen(store: Store, tell: Callable[[str], None]) -> None:
    """`tell` is called with what goes wrong in one of several places, and would be a warning otherwise."""
    if isinstance(store, Places):
        store.tell = tell


@contextmanager
def listening(store: Store, tell: Callable[[str], None]) -> Iterator[None]:
    """As `listen`, within the block."""
    before = store.tell if isinstance(store, Places) else tell
    listen(store, tell)
    try:
        yield
    finally:
        listen(store, before)
