"""What an operator does with the bytes of a repository: copies, files of other tools, proofs, comparison and repair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tenuto.engine.read.choose import Checkpoint
from tenuto.events import Emitter
from tenuto.model.ids import CheckpointId
from tenuto.repo.lineage import resolve
from tenuto.repo.repository import Repo
from tenuto.store.contract import Where
from tenuto.store.registry import open_store

if TYPE_CHECKING:
    from tenuto.api.export import Exported
    from tenuto.api.health import CheckpointHealth
    from tenuto.api.migrate import Check, MigrationReport
    from tenuto.api.salvage import Salvaged
    from tenuto.drill.drill import DrillResult
    from tenuto.history.diff import Diff
    from tenuto.maintenance.checkpoint_copy import RunCopy
    from tenuto.maintenance.compare_copy import CopyCheck
    from tenuto.maintenance.copy_elsewhere import CopyReport
    from tenuto.maintenance.rename_run import RenamedRun
    from tenuto.maintenance.repack import Repacked
    from tenuto.maintenance.repair import RepairReport
    from tenuto.maintenance.repair_plan import RepairPlan
    from tenuto.maintenance.scrub import ScrubReport
    from tenuto.maintenance.verify import VerifyReport
    from tenuto.policy.encoding import Encoding, Preset
    from tenuto.policy.spikes import Spike


class Care:
    """The part of `tenuto.Repository` that copies, converts, compares, verifies and repairs."""

    repo: Repo
    _emitter: Emitter

    def replicate(
        self,
        to: Where,
        *,
        run: str | None = None,
        steps: Iterable[int | str | CheckpointId] | None = None,
        prune: bool = False,
        read: bool = False,
    ) -> CopyReport:
        """Copies checkpoints to another store, every byte verified on the way, and returns what it has copied.

        `to` becomes a copy of this repository, from which everything can be read and in which nobody can train. What it
        has already is skipped; a copy that was cut off is continued. Without `run` and `steps` all is copied. `prune`
        removes there what this repository has removed; `read` reads every byte of the copy first, and replaces what is
        damaged.

        Raises RepositoryError where something else lies in `to`; what goes wrong with one checkpoint is in `failed` of
        the report.
        """
        from tenuto.maintenance.compare_copy import check_copy
        from tenuto.maintenance.copy_elsewhere import execute
        from tenuto.maintenance.copy_plan import plan_copy
        from tenuto.maintenance.copy_record import is_copy

        target = open_store(to)
        ids = None if steps is None else [resolve(self.repo, run or "main", step) for step in steps]
        damaged = check_copy(self.repo, target, run=run, every_byte=True).damaged if read and is_copy(target) else ()
        plan = plan_copy(self.repo, target, run=run, ids=ids, damaged=damaged)
        return execute(self.repo, target, plan, prune=prune, emitter=self._emitter)

    def check_copy(self, of: Where, *, run: str | None = None, read: bool = False) -> CopyCheck:
        """Compares a copy that `replicate` has made with this repository: whether it lags behind, has something else
        under the same names, or is damaged; with `read` every byte of its data files. Writes nothing. Raises
        NotARepository and RepositoryError where no copy of this repository is."""
        from tenuto.maintenance.compare_copy import check_copy

        return check_copy(self.repo, open_store(of), run=run, every_byte=read, emitter=self._emitter)

    def copy_to(
        self,
        to: Where | None = None,
        *,
        steps: int | str | CheckpointId | Iterable[int | str | CheckpointId] = "latest",
        run: str = "main",
        to_run: str | None = None,
        to_step: int | None = None,
        stand_alone: bool = False,
    ) -> RunCopy:
        """Copies checkpoints of `run` into run `to_run` of this repository, or of `to`, which is made where there is no
        repository. Within a repository the copies share all data files; into another one every byte is copied and
        verified. A training of that run there resumes from the newest. All appear at once, or none.

        `to_run`: None: the same name. `to_step`: the step of a single copy; None: that of its source. `stand_alone`:
        copies the data within a repository too.

        Raises UsageError where names meet, the run has come as far already, or sealed bytes would leave their
        repository; RunInUse, CheckpointNotFound and CorruptionError, and errors of the stores.
        """
        from tenuto.maintenance.checkpoint_copy import execute, plan_copies

        wanted = [steps] if isinstance(steps, int | str | CheckpointId) else steps
        ids = [resolve(self.repo, run, step) for step in wanted]
        plan = plan_copies(self.repo, ids, to=to, run=to_run, step=to_step, stand_alone=stand_alone)
        return execute(self.repo, plan, to, emitter=self._emitter)

    def rename_run(self, run: str, new: str) -> RenamedRun:
        """Gives a run another name: its checkpoints with their lines of training, metrics, times and tags, no data
        copied. The old names go into the trash, where `tenuto undelete` finds them for 24 h. Called again, it continues
        where it was cut off.

        Raises RunNotFound, RunInUse while a process trains the run, RemovalRefused where a pin or a hold names one of
        its checkpoints or another run would resume from one, and UsageError where `new` has checkpoints of its own.
        """
        from tenuto.maintenance.rename_run import execute, plan_rename

        return execute(self.repo, plan_rename(self.repo, run, new), emitter=self._emitter)

    def repack(self, run: str = "main", *, encoding: Encoding | Preset = "small") -> Repacked:
        """Rewrites the line of training of a run that has ended in another encoding: the same steps, values,
        metrics, times and tags under a new attempt. Every byte is read back and compared before any of it is visible.
        The originals go into the trash. What several ranks have saved stays a checkpoint of as many.

        Raises RunInUse while a process trains the run, RemovalRefused where a pin or a hold names one of its
        checkpoints, CorruptionError where one is damaged, and SaveFailed where something else comes back.
        """
        from tenuto.maintenance.repack import execute, plan_repack
        from tenuto.policy.encoding import encoding_of

        return execute(self.repo, plan_repack(self.repo, run, encoding_of(encoding)), emitter=self._emitter)

    @staticmethod
    def migrate(
        source: str | Path,
        where: Where,
        *,
        run: str = "main",
        step: int | None = None,
        format: str | None = None,
        entry: str | None = None,
        rename: Sequence[str] = (),
        strip: str = "",
        dtype: str | None = None,
        check: Check = "samples",
        skip_damaged: bool = False,
    ) -> MigrationReport:
        """Makes the checkpoint of another tool at `source`, or all of those in it, checkpoints of `run` in `where`, a
        repository that is made where there is none.

        Each is read without running code from it and without memory for its tensors, written, and compared with its
        source, in samples or (`check="all"`) in every byte. Only when all of them are, they become visible, in the
        order of their steps.

        - `step`: of a single one that tells none; None: the one after `latest`.
        - `format`: of `tenuto.formats.formats()`, where the content alone does not tell.
        - `entry`: of the state, below which it is put; bare weights go below "model".
        - `rename`, `strip`: rules for names such as `"^old=new"`, regular expressions; a prefix to take off first.
        - `dtype`: what floating-point tensors are rounded to.
        - `skip_damaged`: leaves out what cannot be read.

        Raises StoreError and UsageError where there is nothing of a known format or a rule meets nothing, MissingExtra,
        CorruptionError, Unserialisable, RunInUse, and SaveFailed where something else came back than was read.
        """
        from tenuto.api.migrate import Rules, execute, plan_migration
        from tenuto.formats.convert import Renaming, float_type

        rules = Rules(Renaming(rename, strip), None if dtype is None else float_type(dtype), entry)
        plan = plan_migration(Path(source), where, run=run, step=step, format=format, rules=rules)
        return execute(plan, where, check=check, skip_damaged=skip_damaged)

    @staticmethod
    def adopt(
        source: str | Path,
        where: Where | None = None,
        *,
        run: str = "main",
        step: int | None = None,
        format: str | None = None,
    ) -> list[Checkpoint]:
        """Makes the checkpoints of another tool at `source` checkpoints of `run` in place: DCP directories, safetensors
        files, files of `torch.save`. No byte of them is copied or changed: the files get a second name (a hard link) in
        the repository `where`, and an index with digests of every byte. None: `source` itself becomes the repository.

        Both lie in one file system of this machine. Removing the checkpoint leaves the files. Values that are not
        tensors are read, without running code, and kept beside them. Each file is adopted by itself, in the order of
        steps; `step` is of a single one that tells none.

        Raises UsageError and StoreError where a file cannot have a second name or the run has come further,
        Unserialisable for tensors that do not lie in one piece, and what `tenuto.formats.read` raises.
        """
        from tenuto.api.adopt import adopt

        return adopt(source, where, run=run, step=step, format=format)

    def export(
        self,
        out: str | Path,
        *,
        to: str | None = None,
        run: str = "main",
        step: int | str | CheckpointId = "latest",
        entry: str | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        rename: Sequence[str] = (),
        strip: str = "",
        dtype: str | None = None,
        force: bool = False,
    ) -> Exported:
        """Writes tensors of a checkpoint to `out` in the format `to`, or that of its suffix, every byte verified.

        Without `entry`, `include`, `exclude` and `strip` they are those of the state's one model (all, where it has
        none), under their names in it. The rest is as in `migrate`; `force` replaces what is there. Raises UsageError
        for what makes no sense, and what reading a checkpoint raises.
        """
        from tenuto.api.export import Choice, export
        from tenuto.formats.convert import float_type

        rounded = None if dtype is None else float_type(dtype)
        choice = Choice(entry, include, exclude, strip, rename, rounded)
        return export(self.repo, Path(out), lambda: run, step, to=to, choice=choice, force=force, emitter=self._emitter)

    def drill(
        self,
        step: int | str | CheckpointId | None = None,
        *,
        run: str = "main",
        place: Where | None = None,
        target_s: float | None = None,
        timeout_s: float = 3600.0,
        command: Sequence[str] = (),
        steps: int | None = None,
        metrics: Sequence[str] = (),
        tolerance: float = 0.0,
        due_s: float | None = None,
        note: bool = True,
    ) -> DrillResult:
        """Proves a restore as a stranger would make it: a new process loads the checkpoint, and every leaf and value
        that it holds is compared with what was saved. With `command`, that script then trains on from a copy, and the
        metrics that it logs are compared with those that later checkpoints of the line have recorded. The proof, or
        the damage, is noted on the checkpoint (`note`).

        - `step`: None: the latest; with a command the newest that has later checkpoints with metrics.
        - `place`: a location of the repository, or a copy of it, to restore from; None: as a restore does it.
        - `target_s`: within how many seconds the state shall be in memory; `timeout_s`: after how many it is given up.
        - `steps`, `metrics`: how far the script trains (None: to the next checkpoint with metrics), and what is
          compared of it (all, where empty), bit for bit or within the relative `tolerance`.
        - `due_s`: nothing is done while the newest proof of the run is younger.

        What is wrong is in the result, which is false then. Raises RunNotFound, CheckpointNotFound, UsageError where
        something cannot be drilled, and errors of the store.
        """
        from tenuto.drill.drill import execute, plan_drill

        plan = plan_drill(
            self.repo,
            step,
            run=run,
            place=place,
            target_s=target_s,
            timeout_s=timeout_s,
            command=command,
            steps=steps,
            metrics=metrics,
            tolerance=tolerance,
            due_s=due_s,
        )
        return execute(self.repo, plan, note=note, emitter=self._emitter)

    def diff(
        self,
        first: int | str | CheckpointId,
        second: int | str | CheckpointId = "latest",
        *,
        run: str = "main",
        where: Where | None = None,
        entry: str | None = None,
    ) -> Diff:
        """Returns how the second checkpoint differs from the first: structure, values of each leaf, plain values,
        environment and certificate.

        where: another repository, in which the second one lies, or a safetensors file, whose names are compared with
            those of the state's model. entry: only what is at or below this path.

        Leaves are read a block at a time, and not at all where the digests of their chunks are equal. Raises
        LeafNotFound where nothing is at `entry`, and what reading a checkpoint raises.
        """
        from tenuto.api.diff import diff

        return diff(self.repo, first, second, run=run, where=where, entry=entry)

    def health(self, step: int | str | CheckpointId = "latest", run: str = "main") -> CheckpointHealth:
        """Returns what the save of a checkpoint has found of its values: its health, and statistics of each leaf."""
        from tenuto.api.health import health

        return health(self.repo, resolve(self.repo, run, step))

    def spikes(self, metric: str, run: str = "main") -> list[Spike]:
        """Returns where a logged metric that falls, such as a loss, jumps up or diverges, of the checkpoints that lead
        to `latest`, oldest first. Raises MetricNotLogged, naming those that exist."""
        from tenuto.api.health import spikes_of

        return spikes_of(self.repo, run, metric)

    def verify(
        self,
        *,
        run: str | None = None,
        steps: Iterable[int | str | CheckpointId] | None = None,
        read: str = "all",
        limit: int | str | None = None,
        resume: bool = False,
        note: bool = False,
    ) -> VerifyReport:
        """Reads every byte and compares it with what was saved; of everything, or of some checkpoints of `run`.

        - `read`: a part, such as "5%" or "20GiB": what was longest not read. Repeated, it reads everything.
        - `limit`: bytes per second at most, such as "100MB/s".
        - `resume`: continues a verification that was interrupted.
        - `note`: notes the result with each checkpoint of which every byte was read.

        What is damaged is in the report, and raises nothing. Raises CheckpointNotFound, UsageError and StoreError.
        """
        from tenuto.maintenance.reading import parse_amount
        from tenuto.maintenance.verify import execute, plan_parts, plan_verify
        from tenuto.model.sizes import parse_rate

        amount, rate = parse_amount(read), None if limit is None else parse_rate(limit, "limit")
        plan = plan_verify(self.repo, self._chosen(run, steps), listed=steps is None)
        # Of single checkpoints nothing is kept for later, unless a part of them is asked for.
        in_parts = steps is None or amount is not None or rate is not None or resume
        parts = plan_parts(self.repo, plan, amount=amount, rate=rate, resume=resume) if in_parts else None
        return execute(self.repo, plan, emitter=self._emitter, note=note, parts=parts)

    def scrub(self, *, every: str = "30d", limit: int | str | None = None, duration: str | None = None) -> ScrubReport:
        """Verifies each checkpoint that was not verified for `every` ("12h", "30d"), the oldest first, and notes the
        results. `limit`: bytes per second at most; `duration`: for how long. What is left then is for the next call."""
        from tenuto.maintenance.scrub import scrub
        from tenuto.model.sizes import parse_rate, parse_time

        return scrub(
            self.repo,
            every_s=parse_time(every, "every"),
            rate=None if limit is None else parse_rate(limit, "limit"),
            seconds=None if duration is None else parse_time(duration, "for"),
            emitter=self._emitter,
        )

    def plan_repair(
        self,
        *,
        run: str | None = None,
        steps: Iterable[int | str | CheckpointId] | None = None,
        sources: Sequence[Where] = (),
        forget: bool = False,
    ) -> RepairPlan:
        """Returns what is damaged, and what `repair` would put back from where: every byte is read, and nothing
        written. The arguments are those of `repair`."""
        from tenuto.maintenance.repair_plan import plan_repair
        from tenuto.maintenance.repair_sources import Sources

        with Sources.of(self.repo, sources) as found:
            return plan_repair(found, self._chosen(run, steps), emitter=self._emitter, forget=forget)

    def repair(
        self,
        *,
        run: str | None = None,
        steps: Iterable[int | str | CheckpointId] | None = None,
        sources: Sequence[Where] = (),
        forget: bool = False,
    ) -> RepairReport:
        """Puts back what is damaged or missing, of everything or of some checkpoints of `run`, and notes the result.

        Bytes come from the repository's other locations and copies, from `sources` (copies or backups of it), from
        checkpoints with equal chunks, and from what a process has left in this machine's memory. Each is verified
        before it is put. What nobody has stays as it is: the report names the leaves that are lost, and an older
        checkpoint that has them. `forget`: notes and tags that nobody has are given up, so that what they may have been
        about is decided again.

        Raises RepositoryError where this is not the primary, UsageError where a source is another repository,
        CheckpointNotFound, and the error of a store that fails.
        """
        from tenuto.maintenance.repair import execute
        from tenuto.maintenance.repair_plan import plan_repair
        from tenuto.maintenance.repair_sources import Sources

        with Sources.of(self.repo, sources) as found:
            plan = plan_repair(found, self._chosen(run, steps), emitter=self._emitter, forget=forget)
            return execute(found, plan, emitter=self._emitter)

    def salvage(
        self,
        out: str | Path,
        *,
        run: str = "main",
        step: int | str | CheckpointId = "latest",
        force: bool = False,
    ) -> Salvaged:
        """Writes the tensors of a damaged checkpoint that are whole to `out`, in the format of its suffix; the result
        lists the others. Raises CorruptionError where nothing is whole, and UsageError where `out` is there."""
        from tenuto.api.salvage import salvage

        return salvage(self.repo, resolve(self.repo, run, step), Path(out), force=force)

    def _chosen(self, run: str | None, steps: Iterable[int | str | CheckpointId] | None) -> list[CheckpointId] | None:
        """Returns the checkpoints that are meant; None for everything."""
        if steps is not None:
            return [resolve(self.repo, run or "main", step) for step in steps]
        return None if run is None else self.repo.checkpoints(run)
