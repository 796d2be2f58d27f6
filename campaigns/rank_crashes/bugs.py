"""Bugs of a protocol between ranks, put in by name one at a time. Each must be found, or the states find nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest import mock

from campaigns import broken_layers as layers
from campaigns import broken_stores as stores
from campaigns.rank_crashes.jobs import NOTHING, Seeded
from campaigns.seeded_bugs import no_mark
from campaigns.simulated_processes import replacing
from tenuto.engine.group.group_save import GroupCommit
from tenuto.maintenance.replica_tidy import tidy_replicas
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Receipt
from tenuto.ranks import session
from tenuto.ranks.round import Round
from tenuto.ranks.session import Message, Session
from tenuto.repo import commit, unfinished
from tenuto.repo.format import object_names
from tenuto.repo.replicated import members
from tenuto.repo.replicated.places import all_places, places_of
from tenuto.repo.replicated.replica import exists
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes, Content, Store
from tenuto.store.local.syscalls import FileSystem
from tenuto.store.wrappers.delegating import DelegatingStore
from tenuto.testing.checker import PLACE

SAVES: Final = ("saves of two ranks", "saves of three ranks")
TAKEN: Final = ("taken over by more ranks", "taken over by fewer ranks")
RESTARTED: Final = ("restarted at the same board",)
NODES: Final = ("packs on their nodes",)
TAKEN_ON_NODES: Final = ("packs on their nodes, taken over",)
TIDIED: Final = ("packs on their nodes, retention and tidying",)
BOTH: Final = ("packs on their nodes and in the home",)
COPIES: Final = ("each pack in two places",)


@dataclass(frozen=True)
class Bug:
    """`scenarios`: where it is looked for. `patch`: around recording and judging alike."""

    name: str
    breaks: str
    seeded: Seeded = NOTHING
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    scenarios: tuple[str, ...] = SAVES


def _layer(name: str, breaks: str, ranks: range, above: Callable[[FileSystem], FileSystem], *scenarios: str) -> Bug:
    def put(rank: int, inner: FileSystem) -> FileSystem:
        return above(inner) if rank in ranks else inner

    return Bug(name, breaks, Seeded(above=put), scenarios=scenarios or SAVES)


def _wrapper(name: str, breaks: str, ranks: range, around: Callable[[Store], Store], *scenarios: str) -> Bug:
    def put(rank: int, inner: Store) -> Store:
        return around(inner) if rank in ranks else inner

    return Bug(name, breaks, Seeded(around=put), scenarios=scenarios or SAVES)


FIRST, SECOND, ALL = range(1), range(1, 2), range(8)


class Owing(DelegatingStore):
    """Puts of names that end in `late` are acknowledged at once, and done when `pay` is called."""

    def __init__(self, inner: Store, late: str) -> None:
        super().__init__(inner)
        self.late = late
        self.owed: dict[str, tuple[bytes, str]] = {}

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        if not name.endswith(self.late):
            return self.inner.put_if_absent(name, content, token=token)
        self.owed[name] = (b"".join(bytes(piece) for piece in content.pieces()), token)
        return Receipt(name, content.length, self.url)

    def pay(self) -> None:
        owed, self.owed = self.owed, {}
        for name, (data, token) in owed.items():
            self.inner.put_if_absent(name, Bytes(data), token=token)


@contextmanager
def _paid_after_the_commit() -> Iterator[None]:
    original = GroupCommit.commit

    def commit_first(self: GroupCommit, *words: Any, **more: Any) -> None:
        original(self, *words, **more)
        store = self._repo.store
        for part in all_places(store):
            if isinstance(part, Owing):
                part.pay()

    with mock.patch.object(GroupCommit, "commit", commit_first):
        yield


def _accepted_unchecked(raw: bytes, session: str, round: str, rank: int | None = None) -> Message:
    """A message, whoever's and for whatever it is."""
    decoded = _DECODE[0](raw, *_names(raw))
    return Message(session, round, decoded.rank, decoded.kind, decoded.facts, decoded.data)


_DECODE: Final = (session.decode,)
"""Kept where nobody replaces it."""


def _names(raw: bytes) -> tuple[str, str]:
    values = json.loads(raw.partition(b"\n")[0])
    return values["session"], values["topic"]


@contextmanager
def _one_session_for_ever() -> Iterator[None]:
    """Keys and messages do not tell which meeting of the ranks they belong to."""

    def key(self: Session, *parts: str | int) -> str:
        return "/".join(["tenuto", "sessions", "the", *map(str, parts)])

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Session, "key", key))
        stack.enter_context(replacing(session.decode, _accepted_unchecked))
        stack.enter_context(replacing(commit._packs_of, lambda *_: []))
        yield


@contextmanager
def _receipts_of_any_save() -> Iterator[None]:
    """What a rank has put is posted without saying for which save, and read without asking."""
    original = Round.message_key

    def key(self: Round, rank: int) -> str:
        return self._session.key("receipts", rank) if self.kind == "put" else original(self, rank)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Round, "message_key", key))
        stack.enter_context(replacing(session.decode, _accepted_unchecked))
        stack.enter_context(replacing(commit._packs_of, lambda *_: []))
        yield


@contextmanager
def _announced_before_the_commit() -> Iterator[None]:
    """Ranks that do not commit believe what they themselves have put."""
    original = GroupCommit.commit

    def at_once(self: GroupCommit, job: Any, *words: Any, **more: Any) -> None:
        round: Any = self._saves[job.save.save_id].put
        if not self.coordinates:
            assert callable(round.receive)
            round.receive = lambda *_: b'{"bytes":0,"content":"","kind":"go","leaves":0}\n'
        original(self, job, *words, **more)

    with mock.patch.object(GroupCommit, "commit", at_once):
        yield


@contextmanager
def _one_copy_is_enough() -> Iterator[None]:
    original = ReplicatedStore.__init__

    def declared(self: ReplicatedStore, *words: Any, **named: Any) -> None:
        original(self, *words, **named)
        self.copies = 1

    with mock.patch.object(ReplicatedStore, "__init__", declared):
        yield


@contextmanager
def _into_copies_first() -> Iterator[None]:
    original = ReplicatedStore.put_if_absent

    def put(self: ReplicatedStore, name: str, content: Content, *, token: str) -> Receipt:
        if name.endswith("/manifest.json"):
            self._copy(self.placement(name), name, b"".join(content.pieces()), token)
        return original(self, name, content, token=token)

    with mock.patch.object(ReplicatedStore, "put_if_absent", put):
        yield


def _tidied_of_all_uncommitted(repo: Repo, newest: CheckpointId) -> int:
    """Whatever has no manifest is taken for nobody's, of saves under way too."""
    freed, places = 0, places_of(repo.store)
    for place in [] if places is None else places.members:
        for entry in list(place.walk(f"runs/{newest.run}")):
            if object_names.is_pack(entry.name) and not exists(
                repo.store, f"{entry.name.rpartition('/')[0]}/manifest.json"
            ):
                place.delete([entry.name])
                freed += 1
    return freed


BUGS: Final[tuple[Bug, ...]] = (
    _layer(
        "a receipt before its pack is flushed",
        "the manifest is durable, the tensors of one rank are not",
        SECOND,
        lambda inner: layers.SkipFileFlush(inner, ".safetensors"),
    ),
    _layer(
        "a receipt before its index is flushed",
        "a checkpoint whose parts of one rank nobody finds",
        SECOND,
        lambda inner: layers.SkipFileFlush(inner, ".index"),
    ),
    _layer(
        "one rank flushes no directory",
        "the manifest names what is not there",
        SECOND,
        lambda inner: layers.SkipDirectoryFlush(inner, lambda path, last: True),
    ),
    _layer(
        "the coordinator flushes for all",
        "names of a node that only another node has flushed",
        range(1, 8),
        lambda inner: layers.SkipDirectoryFlush(inner, lambda path, last: last[0] == "link"),
    ),
    Bug(
        "a receipt before its pack is put",
        "the manifest is there before a rank's tensors",
        Seeded(around=lambda rank, inner: Owing(inner, ".safetensors") if rank == 1 else inner),
        _paid_after_the_commit,
    ),
    _wrapper(
        "the table of parts after the manifest",
        "a checkpoint that nobody with another layout can read",
        FIRST,
        lambda inner: stores.PutLate(inner, "/boxes.index", "/manifest.json"),
    ),
    _layer(
        "the table of parts not flushed",
        "the same after a crash",
        FIRST,
        lambda inner: layers.SkipFileFlush(inner, "boxes.index"),
    ),
    _wrapper(
        "announced before the manifest",
        "every rank counts a save as committed that is still to be",
        FIRST,
        lambda inner: stores.PutLate(inner, "/manifest.json", "/begin.json"),
    ),
    Bug(
        "a rank believes its own part",
        "one rank counts a save as committed that is still to be",
        patch=_announced_before_the_commit,
    ),
    Bug(
        "receipts of another save",
        "a manifest with the digests of the save before",
        patch=_receipts_of_any_save,
    ),
    Bug(
        "messages of an earlier incarnation",
        "a rank hears that a save of a dead job was committed, and takes it for its own",
        patch=_one_session_for_ever,
        scenarios=RESTARTED,
    ),
    _layer(
        "one rank's flush error ignored",
        "what its disk refused counts as durable",
        SECOND,
        layers.IgnoreFlushError,
        "one rank's disk fails",
        "packs on their nodes, one node's disk fails",
    ),
    _layer(
        "the coordinator's flush error ignored",
        "what the disk of whoever commits refused counts as durable",
        FIRST,
        layers.IgnoreFlushError,
        "the coordinator's disk fails",
    ),
    _layer(
        "one temporary name for all ranks",
        "ranks write over each other's parts",
        ALL,
        layers.SharedTemporary,
    ),
    Bug("no aborted mark", "a late commit names freed parts", patch=no_mark, scenarios=(*TAKEN, *TAKEN_ON_NODES)),
    _layer("rename for link", "a late commit replaces the mark that closed it", ALL, layers.RenameForLink, *TAKEN),
    _wrapper(
        "parts before begin.json",
        "a rank's part that no later job knows of, and nobody frees",
        FIRST,
        lambda inner: stores.PutLate(inner, "/begin.json", ".index"),
    ),
    Bug(
        "unfinished saves stay",
        "what a dead job's ranks have put takes its space for ever",
        patch=lambda: replacing(unfinished.close_unfinished, lambda *_, **__: None),
        scenarios=RESTARTED,
    ),
    _wrapper(
        "parts go before the manifest",
        "a checkpoint that retention removes is torn for a while",
        ALL,
        lambda inner: stores.DeleteLate(inner, "/manifest.json"),
        "retention beside saves",
    ),
    _layer(
        "a receipt before the own place has the pack flushed",
        "the manifest is durable in the home, what lies on a node is not",
        ALL,
        lambda inner: layers.SkipFileFlush(inner, ".safetensors"),
        *NODES,
    ),
    _layer(
        "directories of the own place not flushed",
        "the manifest names what no node has",
        ALL,
        lambda inner: layers.SkipDirectoryFlush(inner, lambda path, last: path.startswith("/data/node-2/runs/")),
        *NODES,
    ),
    Bug(
        "a receipt before the own place has the pack",
        "the manifest is in the home before a rank's tensors are on its node",
        Seeded(
            around=lambda rank, inner: Owing(inner, ".safetensors") if inner.url.startswith("/data/node-") else inner
        ),
        _paid_after_the_commit,
        NODES,
    ),
    Bug(
        "a place that the home does not list",
        "nobody who opens the home finds the packs",
        patch=lambda: replacing(members.join, lambda *_: ()),
        scenarios=NODES,
    ),
    _wrapper(
        "the copy in the home comes with the next save",
        "the loss of a node loses what it had",
        ALL,
        lambda inner: stores.PutLate(inner, ".safetensors", "/begin.json") if inner.url == PLACE else inner,
        *BOTH,
    ),
    Bug(
        "fewer copies than asked for count",
        "the loss of one place loses a checkpoint that two were to have",
        patch=_one_copy_is_enough,
        scenarios=("two of three places",),
    ),
    _layer(
        "one of two copies not flushed",
        "the loss of the other place loses what was acknowledged",
        ALL,
        lambda inner: layers.SkipFileFlush(inner, "/data/copy-1/runs/"),
        *COPIES,
        "one of two places fails",
    ),
    _wrapper(
        "the manifest's copy before those of the indexes",
        "a place that shows a checkpoint which nobody can read there",
        FIRST,
        lambda inner: stores.PutLate(inner, ".index", "/manifest.json") if inner.url != PLACE else inner,
        *COPIES,
    ),
    Bug(
        "the manifest's copy before the manifest",
        "a place that shows a checkpoint which was never committed",
        patch=_into_copies_first,
        scenarios=COPIES,
    ),
    Bug(
        "tidying asks for the manifest alone",
        "what a node has put of a save under way is freed there",
        patch=lambda: replacing(tidy_replicas, _tidied_of_all_uncommitted),
        scenarios=TIDIED,
    ),
    Bug(
        "nothing is tidied",
        "what was removed while a node could not be reached takes its space there for ever",
        patch=lambda: replacing(tidy_replicas, lambda *_: 0),
        scenarios=(*TIDIED, "packs on their nodes, restarted"),
    ),
)
SOUGHT: Final = {
    f"{bug.name}, in {scenario}": replace(bug, scenarios=(scenario,)) for bug in BUGS for scenario in bug.scenarios
}
"""Each bug in each scenario in which it may be found."""
