"""Saves whose manifests are put later, all of them together: until then nothing of them is visible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tenuto.crashpoints import crashpoint
from tenuto.engine.save.commit_protocol import ManifestCallback, SoloCommit
from tenuto.engine.save.job import Job
from tenuto.errors import TenutoError
from tenuto.model import canonical_json
from tenuto.model.canonical_json import Spelled
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Index, IndexEntry, Manifest, Receipt
from tenuto.record import record
from tenuto.repo.commit import commit
from tenuto.repo.repository import Repo
from tenuto.repo.unfinished import abort, free


@record
class Held:
    """A save that has everything but its manifest."""

    manifest: Manifest
    receipts: Sequence[Receipt]
    tree: Spelled
    indexes: Sequence[Index] = ()
    """Where they are kept: the others are read back when the manifest is put."""


class HeldCommit(SoloCommit):
    """Keeps the manifests of saves until all are to be put. `visible`: the crash point after each of them."""

    def __init__(self, repo: Repo, *, visible: str) -> None:
        super().__init__(repo)
        self.held: list[Held] = []
        self._visible = visible

    def commit(
        self,
        job: Job,
        index: Index,
        entry: IndexEntry,
        receipts: Sequence[Receipt],
        *,
        timed: bool,
        report: ManifestCallback,
    ) -> None:
        tree = canonical_json.spell(job.flattened.tree)
        manifest = job.manifest(tree, index, entry, job.timed() if timed else job.about)
        report(replace(manifest, tree=None))
        self.held.append(Held(manifest, tuple(receipts), tree, (index,)))

    def put(self, *, newest_first: bool = False) -> None:
        """Makes all checkpoints exist, in the order of steps, or the other way round."""
        while self.held:
            place = -1 if newest_first else 0
            one = self.held[place]
            commit(self._repo, one.manifest, one.receipts, tree=one.tree, own=one.indexes)
            del self.held[place]
            crashpoint(self._visible)

    def take_back(self, report: Callable[[str], None], *, by: str, spared: Sequence[CheckpointId] = ()) -> None:
        """Closes and frees all saves whose manifest was not put, but for those that are `spared`. Of one whose put
        failed it turns out here whether it exists after all: what that rests on, which is older, is spared too."""
        needed = set(spared)
        for one in reversed(self.held):
            id = one.manifest.id
            if id in needed:
                continue
            try:
                if abort(self._repo, id, one.manifest.save_id, by=by):
                    free(self._repo, id, names=[receipt.name.rpartition("/")[2] for receipt in one.receipts])
                else:
                    needed.update(one.manifest.bases)
            except TenutoError as trouble:
                report(f"what {id} left behind stays until the run is claimed again: {trouble.message}")
        self.held.clear()
