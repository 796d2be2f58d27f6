"""The declarations of a replicated repository: `PerNode` and `Mirror`."""

from __future__ import annotations

from tenuto.errors import UsageError
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.store.contract import Store, Where
from tenuto.store.registry import open_store


class PerNode(ReplicatedStore):
    """Packs in a `directory` of each node's own (such as its disk), everything else in `home`, which all nodes share.
    With `copies=2` each pack is in the home too, so that losing a node loses nothing.

    When a node lacks something at a restore, as after a change in the number of ranks, the node that has it puts it
    into the home. Without a copy there, a checkpoint that is partly on a lost node is skipped with a warning. `node`:
    the name of the node, if host names are not unique.
    """

    def __init__(self, directory: Where, *, home: Where, copies: int = 1, node: str = "") -> None:
        own, shared = _one_place(directory), _one_place(home)
        if own.url == shared.url:
            raise UsageError(
                f"{own.url} is given both as the directory of each node and as the home of all",
                subject=own.url,
                hint="home= is a directory that all nodes share",
            )
        if copies not in (1, 2):
            raise UsageError(
                f"copies={copies!r}: packs can be on their node (1), or on their node and in the home (2)",
                subject=f"copies={copies!r}",
                hint="copies=2 keeps what a lost node had",
            )
        super().__init__(shared, (own, shared)[:copies], copies, per_node=True, node=node)


class Mirror(ReplicatedStore):
    """Every pack in each of several places. The first is the home, where the run is claimed and checkpoints are
    committed.

    A save commits when `copies` of the places (default: all) have each of its packs. A place that fails causes a
    warning and is read only where possible. Each place is a complete repository for readers; commands that remove or
    change something need the home.
    """

    def __init__(self, *places: Where, copies: int | None = None) -> None:
        stores = [_one_place(place) for place in places]
        urls = [store.url for store in stores]
        if len(stores) < 2 or len(set(urls)) < len(urls):
            raise UsageError(
                f"a mirror is of two places or more, each once: {', '.join(urls) or 'none given'}",
                subject=", ".join(urls) or "Mirror()",
                hint='Mirror("/one/place", "/another/place")',
            )
        super().__init__(stores[0], stores, len(stores) if copies is None else copies)


def _one_place(where: Where) -> Store:
    store = open_store(where)
    if isinstance(store, ReplicatedStore):
        raise UsageError(
            f"{store.url} is several places already, and cannot be one of others",
            subject=store.url,
            hint="PerNode(directory, home=, copies=2) has each pack on its node and in the home",
        )
    return store
