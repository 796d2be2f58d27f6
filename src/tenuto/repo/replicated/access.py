"""Queries of a store by callers that need not know whether it is replicated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tenuto.repo.replicated.replica import UnreachableReplica, exists
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.store.contract import Store


def home_of(store: Store) -> Store:
    """Returns the place that decides which objects but packs there are."""
    return store.home if isinstance(store, ReplicatedStore) else store


def copies_of(store: Store, name: str) -> list[Store]:
    """Returns the places that have a copy of an object."""
    order = store.order(name) if isinstance(store, ReplicatedStore) else [store]
    return [one for one in order if exists(one, name)]


def unreachable(store: Store) -> Sequence[UnreachableReplica]:
    """Returns the repository's places that are out of reach from here."""
    return store.unreachable() if isinstance(store, ReplicatedStore) else ()


def describe_missing_pack(store: Store) -> str:
    """Describes a pack that no place has: it may be in a place out of reach."""
    places = unreachable(store)
    if places:
        shown = ", ".join(map(str, places[:3]))
        return f"is not found from here: it may be on {shown}{', …' if len(places) > 3 else ''}"
    return "is missing: it is in none of the repository's places" if isinstance(store, ReplicatedStore) else ""


def free_space(store: Store) -> tuple[str, int | None]:
    """Returns the place that limits packs, and its free bytes."""
    return store.tightest() if isinstance(store, ReplicatedStore) else (store.url, store.free_bytes())


def mark_damaged(store: Store, name: str) -> bool:
    """As `ReplicatedStore.mark_damaged`; a plain store has one copy."""
    return isinstance(store, ReplicatedStore) and store.mark_damaged(name)


def report_to(store: Store, report: Callable[[str], None]) -> None:
    """Sends problems of single places to `report` instead of warnings."""
    if isinstance(store, ReplicatedStore):
        store.report = report


@contextmanager
def reporting_to(store: Store, report: Callable[[str], None]) -> Iterator[None]:
    """Sends problems of single places to `report` within the block."""
    before = store.report if isinstance(store, ReplicatedStore) else report
    report_to(store, report)
    try:
        yield
    finally:
        report_to(store, before)
