"""The random generators of a loader's workers: sent along with each batch, and set again in workers that start anew.

A worker of a DataLoader has generators of its own, seeded when it starts, from which augmentation draws. They are what
they are behind the last batch that *training* was given of this worker; what it has read ahead does not count. So each
batch comes with them (`Sent`), the position keeps those of each worker's latest delivered batch, and a worker that is
started in the middle of an epoch begins with them.

Torch gives an iterator's first batch to worker 0. In an epoch that continues after `n` batches the worker that
training knew as `n % workers` gets that batch, so workers that start there go by that number: their seed,
`get_worker_info()`, and what `worker_init_fn` is given.

A data set's own generators (a `torch.Generator`, a numpy `Generator` or `RandomState`, a `random.Random`) are found in
the attributes of the data set, of what it wraps or transforms by, and of `collate_fn`.
"""

from __future__ import annotations

import json
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch, worker

from tenuto.errors import StateMismatch
from tenuto.integrations.torch.data.host_generators import HostGenerators
from tenuto.state.position import rng
from tenuto.state.position.positions import begin_whole

ROOM: Final = 12 * 1024
"""Bytes for a worker's record at least, so that its size seldom changes: the three global generators take 10,100."""
_MOST: Final = 2048
"""Objects that are looked at for generators of a data set's own, at most."""
_DEEPEST: Final = 8
_WIDEST: Final = 64
"""Elements of a container: a longer one holds samples."""


LEFT_EARLY: Final = (
    "an epoch was left early: where the random generators of persistent workers are after what they had read ahead is "
    "not known before each has given a batch again"
)


class Sent(NamedTuple):
    """A batch with its worker's generators. A tuple, since torch pins what is in one and leaves the rest as it is.

    - `worker`: the number that training knows it by.
    - `record`: the generators behind this batch (`_pack`); None before this worker has drawn any number.
    - `remarks`: what of a saved record has no counterpart in the data set.
    """

    batch: Any
    worker: int
    record: bytes | None
    remarks: tuple[str, ...] = ()


class WorkerGenerators:
    """The generators of one loader's workers, in the process that trains.

    - `ahead`: how many batches a position may lie behind the newest, as with a trainer that reads ahead.
    - `on_remark`: called with what of the saved generators has no counterpart in the data set.
    """

    def __init__(self, loader: DataLoader[Any], on_remark: weakref.WeakMethod[Callable[[str], None]]) -> None:
        """`on_remark` is weak: in a cycle with its position an iterator would release its workers only at garbage
        collection."""
        self.workers: int = loader.num_workers
        self.ahead = 0
        self._dataset: Any = loader.dataset
        self._given: Mapping[str, Any] = {}
        """The data set's plain attributes when the workers were started."""
        self._on_remark = on_remark
        self._records: dict[int, bytes] = {}
        self._recent: deque[tuple[int, int, bytes]] = deque()
        """(batch, worker, record) of the newest deliveries, which a position may lie behind."""
        self._latest: dict[int, bytes] = {}
        self._unknown: set[int] = set()
        """Workers that went on reading in an epoch that was left early, until they have sent a batch again."""
        self.drawn = False
        """Whether workers draw at all."""

    def begin(self, loader: DataLoader[Any], first: int, *, fresh: bool) -> None:
        """Prepares `loader`, a copy of ours, for the next `iter`, whose first batch is number `first` of the epoch.

        fresh: its workers start as at the beginning of training, by their seed; else those that are known begin with
            the generators that were loaded.
        """
        if fresh:
            self._forget()
        self._given = _plain_attributes(self._dataset)
        if self.workers:
            begin = loader.worker_init_fn
            own = begin.own if isinstance(begin, Begin) else begin
            loader.worker_init_fn = Begin(own, first % self.workers, dict(self._latest))

    def changed(self) -> str:
        """Describes what was changed in the data set since persistent workers were given a copy of it; empty if
        nothing was."""
        now = _plain_attributes(self._dataset)
        names = sorted(name for name, value in self._given.items() if now.get(name) != value)
        if not names:
            return ""
        return (
            f"{', '.join(names)} was changed in this process after the loader's persistent workers had started: they "
            "do not see it, and workers of a resumed process do"
        )

    def goes_on(self, *, left_early: bool) -> None:
        """Tells that workers that are there already begin another epoch. `left_early`: before the last one's end."""
        self._records = dict(self._latest)
        self._recent.clear()
        if left_early:
            self._unknown = set(range(self.workers))

    @property
    def unknown(self) -> bool:
        """Whether workers draw, and have read ahead of what was ever delivered."""
        return self.drawn and bool(self._unknown)

    def received(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """Yields the batches of an iterator of the prepared loader."""
        return Received(batches, self, first) if self.workers else batches

    def note(self, number: int, sent: Sent) -> None:
        if sent.record is not None:
            self.drawn = True
            self._unknown.discard(sent.worker)
            self._latest[sent.worker] = sent.record
            self._recent.append((number, sent.worker, sent.record))
            while len(self._recent) > self.ahead:
                _, sender, old = self._recent.popleft()
                self._records[sender] = old
        if sent.remarks and (on_remark := self._on_remark()) is not None:
            for remark in sent.remarks:
                on_remark(remark)

    def _forget(self) -> None:
        self._records, self._latest, self._unknown = {}, {}, set()
        self._recent.clear()

    def state(self, delivered: int | None = None) -> dict[str, Any]:
        """Returns the generators behind the newest batch, or behind the first `delivered` of the epoch. `records`:
        uint8 [workers, room]."""
        found = dict(self._records)
        for number, sender, record in self._recent:
            if delivered is None or number < delivered:
                found[sender] = record
        room = max([ROOM, *map(len, found.values())])
        rows = np.zeros((self.workers, room), np.uint8)
        for number, record in found.items():
            rows[number, : len(record)] = np.frombuffer(record, np.uint8)
        sizes = [len(found.get(number, b"")) for number in range(self.workers)]
        return {"records": rows, "sizes": sizes, "drawn": self.drawn, "unknown": sorted(self._unknown)}

    def load(self, state: Mapping[str, Any] | None, *, inside: bool) -> tuple[str, ...]:
        """Takes saved generators. Returns why numbers drawn in workers may differ; nothing where none are drawn.

        inside: in an epoch; at its end only workers that stay matter.
        """
        self._forget()
        if state is None:
            return ()
        rows, sizes, self.drawn = np.asarray(state["records"], np.uint8), list(state["sizes"]), bool(state["drawn"])
        if rows.ndim != 2 or len(rows) != len(sizes) or not all(0 <= size <= rows.shape[1] for size in sizes):
            raise ValueError("the generators of its workers are malformed")
        if len(sizes) != self.workers:
            if not inside or not self.drawn:
                return ()
            return (
                f"the loader has {_workers(self.workers)}, and had {len(sizes)} when it was saved: "
                "random numbers that they draw are others",
            )
        self._records = {number: rows[number, :size].tobytes() for number, size in enumerate(sizes) if size}
        self._latest = dict(self._records)
        return (LEFT_EARLY,) if state["unknown"] and self.drawn else ()


def _plain_attributes(dataset: Any) -> dict[str, Any]:
    """Returns the numbers, texts and flags of a data set and of those that it wraps, by name."""
    found: dict[str, Any] = {}
    for _ in range(_DEEPEST):
        inside = getattr(dataset, "__dict__", {})
        for name, value in inside.items():
            if type(value) in (int, float, bool, str, type(None)):
                found[f"{type(dataset).__name__}.{name}"] = value
        dataset = inside.get("dataset")
    return found


def _workers(count: int) -> str:
    return {0: "no workers", 1: "one worker"}.get(count, f"{count} workers")


class Received(Iterator[Any]):
    """Takes the generators off each batch."""

    def __init__(self, batches: Iterator[Any], generators: WorkerGenerators, first: int) -> None:
        self._batches = batches
        self._generators = generators
        self._number = first

    def __next__(self) -> Any:
        sent = next(self._batches)
        if not isinstance(sent, Sent):
            return sent
        self._generators.note(self._number, sent)
        self._number += 1
        return sent.batch


def follow(loader: DataLoader[Any], generators: WorkerGenerators, first: int, *, fresh: bool, again: bool) -> None:
    """Has a loader that others iterate give its batches without the generators that its workers send, from its next
    `iter` on. `first`, `fresh`: as `WorkerGenerators.begin` takes them.

    again: its workers take the place of some that the uninterrupted run would still have, so that their seed is drawn
        from elsewhere than the loader's generator.
    """
    kind = type(loader)
    if not issubclass(kind, _Followed):
        made = _followed_kinds.get(kind)
        if made is None:
            made = _followed_kinds[kind] = type(kind.__name__, (_Followed, kind), {"__module__": kind.__module__})
        loader.__class__ = made
    loader.__dict__[_NEXT] = (generators, first, fresh, again)


_NEXT: Final = "_tenuto_next"
_followed_kinds: Final[dict[type[Any], type[Any]]] = {}


class _Followed(DataLoader[Any]):
    def __iter__(self) -> Any:
        generators, first, fresh, again = self.__dict__[_NEXT]
        if self._iterator is None or not self.persistent_workers:
            generators.begin(self, first, fresh=fresh)
        own = self.generator
        if again:
            self.generator = torch.Generator()
        try:
            return generators.received(super().__iter__(), first)
        finally:
            self.generator = own


# -- in a worker


class Begin:
    """The `worker_init_fn` of a loader whose workers send their generators.

    - `own`: that of the loader, called as torch calls it.
    - `turn`: what the workers' numbers are ahead of torch's.
    - `records`: the generators to begin with, by number.
    """

    def __init__(self, own: Callable[[int], None] | None, turn: int, records: Mapping[int, bytes]) -> None:
        self.own = own
        self.turn = turn
        self.records = records

    def __call__(self, worker_id: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        number = (worker_id + self.turn) % info.num_workers
        if self.turn:
            _seed(info, worker_id, number)
        if self.own is not None:
            self.own(number)
        following = _Following(number, self.records.get(number))
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            kind.fetch = _followed(kind.fetch, following)  # type: ignore[method-assign]
        fetch._IterableDatasetFetcher.__init__ = _beginning(fetch._IterableDatasetFetcher.__init__)  # type: ignore[method-assign]


def _seed(info: Any, worker_id: int, number: int) -> None:
    """Seeds the generators as torch does for worker `number`, and has `get_worker_info` say that number."""
    base = info.seed - worker_id
    random.seed(base + number)
    torch.manual_seed(base + number)
    np.random.seed(worker._generate_state(base, number))  # type: ignore[no-untyped-call]
    worker._worker_info = worker.WorkerInfo(
        id=number, num_workers=info.num_workers, seed=base + number, dataset=info.dataset
    )


def _beginning(plain: Callable[..., None]) -> Callable[..., None]:
    """Wraps the beginning of an iteration in a worker; the first one may continue an epoch."""
    before = 0

    def begin(self: Any, dataset: Any, *arguments: Any) -> None:
        nonlocal before
        if before:
            begin_whole(dataset)
        before += 1
        plain(self, dataset, *arguments)

    return begin


def _followed(plain: Callable[[Any, Any], Any], following: _Following) -> Callable[[Any, Any], Any]:
    def fetch_and_follow(self: Any, index: Any) -> Any:
        following.before(self)
        return following.sent(self, plain(self, index))

    return fetch_and_follow


class _Following:
    """What a worker knows of its own generators."""

    def __init__(self, number: int, record: bytes | None) -> None:
        self._number = number
        self._begin_with = record
        self._generators = HostGenerators()
        self._own = _OwnGenerators()
        self._first: bytes | None = None
        self._drawn = False
        self._remarks: tuple[str, ...] = ()

    def before(self, fetcher: Any) -> None:
        if self._begin_with is not None:
            self._remarks = _set(self._begin_with, fetcher, self._own.of(fetcher))
            self._begin_with = None
        if self._first is None:
            self._first = _pack(self._generators, self._own.of(fetcher))

    def sent(self, fetcher: Any, batch: Any) -> Sent:
        record = _pack(self._generators, self._own.of(fetcher))
        self._drawn = self._drawn or record != self._first
        remarks, self._remarks = self._remarks, ()
        return Sent(batch, self._number, record if self._drawn else None, remarks)


Own = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_OWN: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class _OwnGenerators:
    """The generators in attributes of a worker's data set and of its `collate_fn`, each once, by path.

    Looking through all attributes takes longer than reading a small batch, so that is done for the first batches and
    then seldom; between, the attributes that had a generator are asked for the one they have now.
    """

    _SELDOM: Final = 64

    def __init__(self) -> None:
        self._asked = 0
        self._fetcher: Any = None
        self._places: list[tuple[str, Any, Any]] = []

    def of(self, fetcher: Any) -> dict[str, Own]:
        if fetcher is not self._fetcher or self._asked < 3 or self._asked % self._SELDOM == 0:
            self._fetcher, self._places = fetcher, list(_places(fetcher))
        self._asked += 1
        found = {}
        for path, holder, name in self._places:
            one = holder[name] if type(holder) is not dict else holder.get(name)
            if isinstance(one, _OWN):
                found[path] = one
        return found


def _places(fetcher: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields where generators are: path, the container, and the key in it."""
    seen: set[int] = {id(np.random.mtrand._rand), id(random._inst), id(torch.default_generator)}
    todo: deque[tuple[str, Any, Any, int]] = deque()
    roots = {"dataset": fetcher.dataset, "collate_fn": fetcher.collate_fn}
    todo.extend((name, roots, name, 0) for name in roots)
    while todo and len(seen) < _MOST:
        path, holder, name, depth = todo.popleft()
        value = holder[name]
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        if isinstance(value, _OWN):
            yield path, holder, name
            continue
        inside: Any = value if type(value) in (dict, list, tuple) else getattr(value, "__dict__", None)
        if isinstance(value, type) or type(inside) not in (dict, list, tuple) or len(inside) > _WIDEST:
            continue
        names = list(inside) if type(inside) is dict else range(len(inside))
        todo.extend(
            (f"{path}.{one}", inside, one, depth + 1)
            for one in names
            if isinstance(inside[one], (*_OWN, dict, list, tuple)) or hasattr(inside[one], "__dict__")
        )


def _pack(generators: HostGenerators, own: Mapping[str, Own]) -> bytes:
    """Returns the states as bytes: the length of a JSON header, the header, and the words of the global generators."""
    captured = generators.capture()
    version, keys, gauss = captured.python
    python = np.array(keys, dtype=np.uint32).tobytes()
    numpy = captured.numpy
    words = (
        np.asarray(numpy["state"].get("key", ()), np.uint32).tobytes() if numpy["bit_generator"] == rng.MT19937 else b""
    )
    torchs = bytes(captured.torch["cpu"].numpy())
    header = {
        "python": [version, gauss, len(python)],
        "numpy": _plain({**numpy, "state": {**numpy["state"], "key": None}} if words else numpy),
        "words": len(words),
        "own": {path: _own_state(one) for path, one in own.items()},
    }
    head = json.dumps(header).encode()
    return b"".join((len(head).to_bytes(4, "little"), head, python, words, torchs))


def _own_state(generator: Own) -> tuple[str, Any]:
    if isinstance(generator, torch.Generator):
        return "torch", bytes(generator.get_state().numpy()).hex()
    if isinstance(generator, np.random.Generator):
        return "numpy", _plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return "RandomState", _plain(generator.get_state(legacy=False))
    return "random", generator.getstate()


def _plain(value: Any) -> Any:
    """Returns numpy's state of a generator as JSON has it."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "of": value.dtype.str}
    return value.item() if isinstance(value, np.generic) else value


def _made(value: Any) -> Any:
    """Returns what `_plain` was given."""
    if isinstance(value, dict):
        return (
            np.array(value["array"], value["of"]) if "of" in value else {k: _made(inner) for k, inner in value.items()}
        )
    return value


def _set(record: bytes, fetcher: Any, own: Mapping[str, Own]) -> tuple[str, ...]:
    """Sets the generators. Returns a remark for each of a data set's own on one side alone."""
    try:
        begin = 4 + int.from_bytes(record[:4], "little")
        header = json.loads(record[4:begin])
        version, gauss, length = header["python"]
        python, rest = record[begin : begin + length], record[begin + length :]
        words, torchs = rest[: header["words"]], rest[header["words"] :]
        numpy = _made(header["numpy"])
        if words:
            numpy["state"]["key"] = np.frombuffer(words, np.uint32)
        state = {
            "python": {"version": version, "gauss": gauss, "keys": np.frombuffer(python, np.uint32)},
            "numpy": numpy,
            "torch": {"cpu": torch.frombuffer(bytearray(torchs), dtype=torch.uint8)},
        }
        rng.apply(state)
        saved = header["own"]
        unmatched = {path: "is new" for path in own.keys() - saved.keys()}
        for path, (kind, inner) in saved.items():
            found = own.get(path) or _missing(fetcher, path, kind, inner)
            if found is None:
                unmatched[path] = "is not there any more"
            else:
                _set_own(found, inner)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise StateMismatch(
            f"the saved random generators of a loader's worker cannot be used: {error!r}", subject="data/workers"
        ) from error
    return tuple(
        f"{path}, a random generator in the loader's workers, {what}" for path, what in sorted(unmatched.items())
    )


def _missing(fetcher: Any, path: str, kind: str, state: Any) -> Own | None:
    """Returns a new generator in the place of one that a data set makes when it first needs it: in an attribute that
    is None. None where there is no such place."""
    holder: Any = fetcher
    *names, last = path.split(".")
    for name in names:
        if type(holder) in (list, tuple):
            holder = holder[int(name)]
        else:
            holder = holder.get(name) if type(holder) is dict else getattr(holder, name, None)
    if holder is fetcher or getattr(holder, last, state) is not None:
        return None
    made: Own
    if kind == "torch":
        made = torch.Generator()
    elif kind == "numpy":
        made = np.random.Generator(_BIT_GENERATORS[state["bit_generator"]]())
    else:
        made = random.Random() if kind == "random" else np.random.RandomState()
    setattr(holder, last, made)
    return made


_BIT_GENERATORS: Final = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}


def _set_own(generator: Own, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(bytes.fromhex(state)), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _made(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_made(state))
    else:
        version, keys, gauss = state
        generator.setstate((version, tuple(keys), gauss))
