"""Several places as one store: the short forms `PerNode` and `Mirror` of `Tiers`, and what others ask of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from tenuto.errors import UsageError
from tenuto.repo.replicated.replica import UnreachableReplica, exists
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.replicated.tiers import Tier, Tiers
from tenuto.store.contract import Store, Where
from tenuto.store.registry import open_store


def places_of(store: Store) -> ReplicatedStore | None:
    """Returns the store as one of several places; None if it is a single place. Nothing else makes this distinction."""
    return store if isinstance(store, ReplicatedStore) else None


def all_places(store: Store) -> list[Store]:
    """Returns the home and all other places in reach; a plain store is its own home."""
    places = places_of(store)
    return [store] if places is None else [places.home, *places.others]


def tiers_of(store: Store) -> Tiers | None:
    """Returns the store as the tiers that this process has declared; None where it has declared none."""
    return store if isinstance(store, Tiers) else None


def followers_of(store: Store) -> Sequence[Store]:
    """Returns the places that are filled in the background, in reach or not, fastest first."""
    places = places_of(store)
    return () if places is None else places.followers


def places_read(store: Store, directory: str) -> Sequence[str]:
    """Returns the URLs of the places that data files in this directory were last read from, where it is one of
    several."""
    places = places_of(store)
    return () if places is None else places.sources(directory)


def home_of(store: Store) -> Store:
    """Returns the place that decides which objects but packs there are."""
    places = places_of(store)
    return store if places is None else places.home


def copies_of(store: Store, name: str) -> list[Store]:
    """Returns the places that have a copy of an object."""
    return list(each_copy(store, name))


def each_copy(store: Store, name: str) -> Iterable[Store]:
    """Yields the places that have a copy of an object, fastest first. None is asked before those in front of it. One
    that does not answer has none."""
    return (one for one in places_in_order(store, name) if exists(one, name))


def places_in_order(store: Store, name: str) -> list[Store]:
    """Returns the places that may have a copy of an object, fastest first."""
    places = places_of(store)
    return [store] if places is None else places.order(name)


def unreachable(store: Store) -> Sequence[UnreachableReplica]:
    """Returns the repository's places that are out of reach from here."""
    places = places_of(store)
    return () if places is None else places.unreachable()


def describe_missing_pack(store: Store) -> str:
    """Describes a pack that no place has: it may be in a place out of reach."""
    missed = unreachable(store)
    if missed:
        shown = ", ".join(map(str, missed[:3]))
        return f"is not found from here: it may be on {shown}{', …' if len(missed) > 3 else ''}"
    return "" if places_of(store) is None else "is missing: it is in none of the repository's locations"


def free_space(store: Store) -> tuple[str, int | None]:
    """Returns the place that limits packs, and its free bytes."""
    places = places_of(store)
    return (store.url, store.free_bytes()) if places is None else places.tightest()


def is_kept(store: Store, name: str) -> bool:
    """Returns whether as many places have a pack as a save asks for; of a single place that it has it."""
    places = places_of(store)
    return places is None or places.is_kept(name)


def check_sharing(store: Store) -> None:
    """Raises UsageError where the data files of several checkpoints cannot be shared: encoded and sealed saves need
    those of earlier ones in the primary, or on the node of the rank that has written them."""
    places = places_of(store)
    if places is None or places.home in places.packs_in:
        return
    if not places.declared.per_node or (isinstance(places, Tiers) and places.fills_home):
        raise UsageError(
            f"{store.url} gets its data files in the background, and checkpoints that are encoded or sealed share "
            "theirs in the primary",
            subject="encoding",
            hint="a primary that saves wait for: Tiers(Tier(PRIMARY), Tier(SLOWER)), Mirror(…), or "
            "PerNode(DIRECTORY, home=PRIMARY); or encoding='plain' in a repository without keys",
        )


def mark_damaged(store: Store, name: str) -> bool:
    """Marks the copy of `name` read last as damaged. Returns whether another one is read from now on."""
    places = places_of(store)
    return places is not None and places.mark_damaged(name)


def report_to(store: Store, report: Callable[[str], None]) -> None:
    """Sends problems of single places to `report` instead of warnings."""
    places = places_of(store)
    if places is not None:
        places.report = report


@contextmanager
def reporting_to(store: Store, report: Callable[[str], None]) -> Iterator[None]:
    """Sends problems of single places to `report` within the block."""
    places = places_of(store)
    before = report if places is None else places.report
    report_to(store, report)
    try:
        yield
    finally:
        report_to(store, before)


class PerNode(Tiers):
    """Data files in a `directory` of each node's own (such as its disk), everything else in `home`, the primary, which
    all nodes share. Tensors of at most 64 KiB that several nodes have alike are in both. With `copies=2` each data file
    is in the primary too, so that losing a node loses nothing.

    When a node lacks something at a restore, as after a change in the number of ranks, the node that has it puts it
    into the primary until all have read it. Without a copy there, a restore passes over a checkpoint that is partly on
    a lost node, and says so. `node`: the name of the node, if host names are not unique.
    """

    def __init__(self, directory: Where, *, home: Where, copies: int = 1, node: str = "") -> None:
        own, shared = open_store(directory), open_store(home)
        if own.url == shared.url:
            raise UsageError(
                f"{own.url} is given both as the directory of each node and as the primary of all",
                subject=own.url,
                hint="home= is a directory that all nodes share",
            )
        if copies not in (1, 2):
            raise UsageError(
                f"copies={copies!r}: data files can be on their node (1), or on their node and in the primary (2)",
                subject=f"copies={copies!r}",
                hint="copies=2 keeps what a lost node had",
            )
        super().__init__(Tier(own, per_node=True), Tier(shared, wait=copies == 2), copies=copies, node=node)
        self.fills_home = False


class Mirror(Tiers):
    """Every data file in each of several locations. The first is the primary, where the run is claimed and checkpoints
    are committed.

    A save commits when `copies` of the locations (default: all) have each of its data files. A location that fails
    causes a warning, and is only read from then on. Each location is a complete repository for readers; commands that
    remove or change something need the primary.
    """

    def __init__(self, *places: Where, copies: int | None = None) -> None:
        stores = [open_store(place) for place in places]
        urls = [store.url for store in stores]
        if len(stores) < 2 or len(set(urls)) < len(urls):
            raise UsageError(
                f"a mirror needs two or more locations, each once: {', '.join(urls) or 'none given'}",
                subject=", ".join(urls) or "Mirror()",
                hint='Mirror("/one/place", "/another/place")',
            )
        super().__init__(*(Tier(store, wait=True) for store in stores), copies=copies)
