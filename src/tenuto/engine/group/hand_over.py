"""What some rank of a restore needs and does not find, and another rank's node has: that rank puts it into the home.

Only the chunks that somebody lacks go there, as partial copies of their packs, and only until all ranks have read.
Where every rank finds what it needs, this costs one round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from tenuto.engine.group.rounds import becomes_visible
from tenuto.engine.read.copy_packs import copy_packs
from tenuto.engine.read.node_share import PackRanges
from tenuto.errors import CorruptionError, StoreError, TenutoError
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Manifest
from tenuto.ranks.round import Round
from tenuto.record import record
from tenuto.repo.format.columns import Kind, decode_columns, decode_json, encode_columns, encode_json
from tenuto.repo.replicated.partial_copy import PartialCopy, Span, partial_name
from tenuto.repo.replicated.replica import exists
from tenuto.repo.replicated.replicated_store import ReplicatedStore
from tenuto.repo.repository import Repo
from tenuto.units import count, size

if TYPE_CHECKING:
    from tenuto.engine.group.group import JobGroup

Needs = Mapping[str, Span]
"""By the name of a pack, the bytes of it that a rank reads, in whole chunks."""
NOWHERE: Final = -1
_KINDS: Final[tuple[Kind, ...]] = (
    ("pack", "U64", "<u8"),
    ("low", "U64", "<u8"),
    ("high", "U64", "<u8"),
    ("names", "U8", "|u1"),
)


@record(eq=False)
class LackedRanges:
    """Bytes of packs that some ranks lack: `ranges.pack` are places in `names`, full names of packs."""

    names: Sequence[str]
    ranges: PackRanges

    @classmethod
    def of(cls, needs: Needs) -> LackedRanges:
        names = sorted(needs)
        return _united(names, [LackedRanges([name], _ranges_of(needs[name])) for name in names])

    def encode(self) -> bytes:
        ranges = self.ranges
        columns = {"pack": ranges.pack, "low": ranges.low, "high": ranges.high, "names": encode_json(list(self.names))}
        return encode_columns(columns, _KINDS, narrow=True)

    @classmethod
    def decode(cls, data: bytes) -> LackedRanges:
        """Raises CorruptionError for what no rank of this version sends."""
        name = "what a rank lacks"
        columns = decode_columns(data, _KINDS, narrow=True, name=name, what="ranges of data files")
        pack, low, high = (columns[column].astype(np.int64) for column, _, _ in _KINDS[:3])
        return cls([str(one) for one in decode_json(columns, "names", name)], PackRanges(pack, low, high))

    def of_packs(self, chosen: Sequence[int]) -> LackedRanges:
        """Returns what is lacked of the packs with these numbers, ascending."""
        lines = np.flatnonzero(np.isin(self.ranges.pack, chosen))
        found = self.ranges.take(lines)
        numbers = np.searchsorted(np.array(chosen, np.int64), found.pack)
        return LackedRanges([self.names[one] for one in chosen], PackRanges(numbers, found.low, found.high))

    def copies(self, token: str) -> dict[str, PartialCopy]:
        """Returns the partial copy of each pack."""
        found = {}
        for number, name in enumerate(self.names):
            lines = slice(*np.searchsorted(self.ranges.pack, (number, number + 1)).tolist())
            found[name] = PartialCopy(partial_name(name, token), (self.ranges.low[lines], self.ranges.high[lines]))
        return found


def _ranges_of(span: Span) -> PackRanges:
    return PackRanges(np.zeros(len(span[0]), np.int64), *span)


def _united(names: Sequence[str], parts: Sequence[LackedRanges]) -> LackedRanges:
    """Returns what is lacked in all, of packs of these names, ascending."""
    place = {name: number for number, name in enumerate(names)}
    packs = [np.array([place[name] for name in one.names], np.int64)[one.ranges.pack] for one in parts]
    pack, low, high = (
        np.concatenate([np.zeros(0, np.int64), *column])
        for column in (packs, [one.ranges.low for one in parts], [one.ranges.high for one in parts])
    )
    return LackedRanges(names, PackRanges(pack, low, high).merged(gap=0))


def _exchange_lacks(
    round: Round, places: ReplicatedStore, needs: Callable[[], Needs], deadline_s: float
) -> tuple[list[str], LackedRanges | None]:
    """Returns the packs of which some rank lacks something, the same on every rank; on the coordinator also what."""
    phase = "telling what is not found"
    try:
        lacked = {name: span for name, span in needs().items() if not places.has(name)}
    except TenutoError:
        lacked = {}  # reading it meets the error again, and reports it
    united = None
    with round:
        round.send(LackedRanges.of(lacked).encode() if lacked else b"")
        if round.coordinates:
            parts = [LackedRanges.decode(one) for one in round.gather(deadline_s, phase) if one]
            united = _united(sorted({name for one in parts for name in one.names}), parts)
            round.broadcast(canonical_json.dumps(united.names))
        return [str(name) for name in canonical_json.loads(round.receive(deadline_s, phase))], united


def _exchange_givers(
    round: Round, places: ReplicatedStore, names: Sequence[str], united: LackedRanges | None, deadline_s: float
) -> LackedRanges:
    """Returns what this rank has to put into the home. Raises CorruptionError, on all ranks, where no rank has one of
    the packs."""
    phase = "telling who has what is not found"
    here = [number for number, name in enumerate(names) if any(exists(store, name) for store in places.others)]
    with round:
        round.send(canonical_json.dumps(here))
        if round.coordinates:
            assert united is not None, "gathered before"
            givers, posts = [NOWHERE] * len(names), round.gather(deadline_s, phase)
            for rank, numbers in reversed(list(enumerate(posts))):
                for number in canonical_json.loads(numbers):
                    givers[number] = rank
            lost = names[givers.index(NOWHERE)] if NOWHERE in givers else ""
            tasks: dict[int, list[int]] = {}
            for number, giver in enumerate(givers):
                tasks.setdefault(giver, []).append(number)
            each = [united.of_packs(tasks[rank]).encode() if rank in tasks else b"" for rank in range(len(posts))]
            round.broadcast(canonical_json.dumps(lost), each)
        lost = str(canonical_json.loads(round.receive(deadline_s, phase)))
        own = b"" if lost else round.own_reply()
    if lost:
        raise CorruptionError(
            f"{lost} is on no node of this job, nor in {places.url}: it was on one that is not here, or is lost",
            subject=lost,
            object=lost,
        )
    return LackedRanges.decode(own) if own else LackedRanges.of({})


class HandOver:
    """The ranks of one job, handing on what is needed for one restore."""

    def __init__(self, repo: Repo, places: ReplicatedStore, group: JobGroup, deadline_s: float) -> None:
        self._repo = repo
        self._places = places
        self._group = group
        self._deadline_s = deadline_s
        self._token = ""
        self._ours: LackedRanges | None = None

    def agree(self, needs: Callable[[], Needs]) -> bool:
        """Exchanges what each rank needs and has. Returns, alike on all ranks, whether anything has to be put. Raises
        CorruptionError, on all ranks, where no rank has it, and what `Round.gather` does."""
        round = self._group.round("restore")
        names, united = _exchange_lacks(round, self._places, needs, self._deadline_s)
        if not names:
            return False
        round = self._group.round("restore")
        self._token = hashlib.sha256(f"{self._group.agreement.session.id} {round.number}".encode()).hexdigest()[:32]
        self._ours = _exchange_givers(round, self._places, names, united, self._deadline_s)
        self._places.partial_copies = {name: partial_name(name, self._token) for name in names}
        return True

    def put(self, manifest: Manifest) -> None:
        """Puts this rank's part, with one warning. Raises what `copy_packs` does."""
        ours = self._ours
        put: list[int] = []
        if ours is None or not ours.names:
            return
        copies = ours.copies(self._token)
        copy_packs(self._repo, manifest, copies, self._places.home, lambda _, nbytes: put.append(nbytes))
        self._places.warn(
            f"{size(sum(put))} of {count(len(put), 'data file')} of {manifest.id} are put into {self._places.url} "
            "while ranks restore that do not find them"
        )

    def await_visible(self, id: CheckpointId) -> None:
        """Waits until the home shows what was put. A network file system remembers for a while that a name was absent;
        what stays so, reading reports."""
        home, copies = self._places.home, self._places.partial_copies.values()

        def visible() -> bool:
            for directory in {id.directory, *(copy.rpartition("/")[0] for copy in copies)}:
                home.children(directory)  # listed first, which makes a network file system look again
            return all(exists(home, copy) for copy in copies)

        becomes_visible(visible, self._group.timeout_s, self._group.agreement.session.settings.clock)

    def end(self) -> None:
        """Removes what this rank has put, when all ranks have read, or some have failed."""
        self._places.partial_copies = {}
        ours, self._ours = self._ours, None
        if ours is None or not ours.names:
            return
        try:
            self._places.home.delete([copy.name for copy in ours.copies(self._token).values()])
        except StoreError as error:
            self._places.warn(f"{error.message}: what was put into {self._places.url} stays until `tenuto gc`")
