"""How a save comes to its commit: of one process by itself, or of all ranks of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from tenuto.engine.save.handle import Save
from tenuto.engine.save.job import Job
from tenuto.errors import ShardMismatch
from tenuto.model import canonical_json
from tenuto.model.records import Index, IndexEntry, Manifest, Receipt
from tenuto.repo.commit import begin, commit
from tenuto.repo.ownership.claim import Attempt
from tenuto.repo.repository import Repo
from tenuto.state.contract import Flattened

ManifestCallback = Callable[[Manifest], None]


class CommitProtocol(Protocol):
    """Called in this order for each save: `take` by the training thread, the others by the writing thread."""

    @property
    def rank(self) -> int: ...

    @property
    def coordinates(self) -> bool:
        """Whether this process begins saves, commits them, and frees what is left of those that fail."""
        ...

    @property
    def has_peers(self) -> bool:
        """Whether other processes may still put objects of a save that fails here."""
        ...

    def missed(self, step: int, error: BaseException) -> None:
        """Notes that this process cannot even begin to `take` what it was to save. Raises nothing."""
        ...

    def take(self, flattened: Flattened, save: Save) -> Flattened:
        """Returns the part of the state that this process writes. Waits for others only for a new structure."""
        ...

    def begin(self, job: Job, attempt: Attempt) -> None:
        """Returns when objects of the save may be put. `job.names` are those of this process."""
        ...

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
        """Commits once everything of this process is durable, as `receipts` prove. Returns when the checkpoint exists;
        `report` is called with its manifest, the tree left out, before that."""
        ...

    def failed(self, save: Save, error: BaseException) -> BaseException:
        """Notes that this process cannot complete the save. Returns why the save has failed: `error`, or an earlier one
        of another process. Raises nothing."""
        ...


class SoloCommit:
    """Commits the saves of a process by itself."""

    rank = 0
    coordinates = True
    has_peers = False

    def __init__(self, repo: Repo) -> None:
        self._repo = repo

    def take(self, flattened: Flattened, save: Save) -> Flattened:
        """Raises ShardMismatch for a state of which this process has only a part."""
        part = next((spec for spec in flattened.specs if spec.whole is not None), None)
        if part is not None or flattened.leaf is not None:
            path = part.path if part is not None else "a tensor"
            raise ShardMismatch(
                f"{path} is a part of a larger tensor, and this process saves alone",
                subject=path,
                hint="save from all processes of the job: init_process_group, or ranks=tenuto.SharedFiles(…)",
            )
        return flattened

    def begin(self, job: Job, attempt: Attempt) -> None:
        begin(attempt, job.save.step, job.save.save_id, job.names, bases=job.bases)

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
        tree, about = canonical_json.spell(job.flattened.tree), job.timed() if timed else job.about
        manifest = job.manifest(tree, index, entry, about)
        report(replace(manifest, tree=None))
        commit(self._repo, manifest, receipts, tree=tree, own=(index,))

    def failed(self, save: Save, error: BaseException) -> BaseException:
        return error

    def missed(self, step: int, error: BaseException) -> None:
        """Does nothing: no other process waits for it."""
