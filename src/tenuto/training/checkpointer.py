"""The Checkpointer of a training loop."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self, overload

from tenuto.concurrency.interruption import undisturbed
from tenuto.engine.read.choose import Restored
from tenuto.engine.read.opened import Opened
from tenuto.engine.save.handle import Save
from tenuto.errors import ForkedProcess, UsageError
from tenuto.events import AnySink, Emitter, listed
from tenuto.policy.encoding import Encoding, Preset
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.save import SavePolicy
from tenuto.ranks.contract import Ranks
from tenuto.ranks.detection import find_ranks
from tenuto.repo.keys import KeySource
from tenuto.repo.lineage import latest
from tenuto.sharding.write_plan import Strategy
from tenuto.state.position.training_position import TrainingPosition
from tenuto.store.contract import Where
from tenuto.telemetry.console import Log, console
from tenuto.training import run_registry
from tenuto.training.arguments import (
    ArgumentAliases,
    Capture,
    OnBusy,
    OnError,
    OnUnhealthy,
    ResumeFrom,
    Settings,
    as_floats,
    count,
    tag_names,
)
from tenuto.training.emergency import AFTER_S, Places
from tenuto.training.exit_status import before_exit, leaving_with
from tenuto.training.loops import Batches, Epochs, Steps
from tenuto.training.preemption import end_at_once, save_sealed
from tenuto.training.snapshot import check_platform
from tenuto.training.stats import Stats
from tenuto.training.training_session import CLOSE_DEADLINE_S, TrainingSession
from tenuto.training.uncounted import warn_of_epochs


class NullTraining:
    """The training of a Checkpointer that was built while a worker imported the main module: its loops are over before
    they begin."""

    def __init__(self) -> None:
        self.position = TrainingPosition(None)
        self.stopping = True

    def open_step(self, *, given_batch: bool = False) -> None: ...

    def complete_step(self, *, epoch_ended: bool = False, ending: bool = False, rest_follows: bool = False) -> None: ...

    def end_epoch(self, *, ending: bool) -> None: ...

    def epoch_was_one_step(self) -> None: ...

    def leave_batches(self, *, none_left: bool = False) -> None: ...

    def leave_loop(self) -> None: ...


class Checkpointer:
    """Saves and resumes one run of training.

    - `where`: a directory, a URL, or a store; created if need be, and nothing foreign in it is touched.
    - `state`: a mapping of names to models, optimizers, anything with `state_dict`/`load_state_dict`, tensors, plain
      values; the objects themselves, which the Checkpointer reads at every save.
    - `run`: the name of this training, if the repository has several.
    - `data`: the loader, whose position is saved too.
    - `save`: when: `every(...)`, `on.end()`, `on.signal()`, `on.improve(metric)`, `on.drop(metric, by=)`, combined
      with `|`. By default `every(minutes=10) | on.end() | on.signal()`.
    - `keep`: what: `keep.latest(n)`, `keep.best(n, metric)`, `keep.every(steps=)`, `keep.daily(days)`, combined with
      `|`. By default `keep.latest(3)`.
    - `resume_from`: "latest", a step, a tag, "best:val_loss" (see `load`), or None to start afresh. Whatever is not
      "latest" is what each start goes back to.
    - `in_flight`: how many saves may be in progress in the background, each with an image of the state's size in host
      memory. They are written and committed one after the other, in order; with more than one, training continues while
      a slow save is still being written. If memory does not hold all, fewer are in flight, and a warning says so.
    - `on_busy`: whether a save that is due while `in_flight` are waits for the oldest ("wait") or is skipped ("skip").
    - `on_error`: whether a failed save warns, and changes the exit status ("warn"), or also raises at the next call
      ("raise").
    - `takeover`: claim the run even if its owner is alive.
    - `wait_for_owner`: how many seconds to wait for a process that owns the run. By default the Checkpointer waits only
      a few seconds for one that runs on this host and is not leaving, a minute for any other one, and then raises
      RunInUse.
    - `memory`: when the state is also sealed in memory that outlives the process (`every(steps=1)`), so that a crash
      loses a step and not all since the last save (one in the middle of that copy, while a save is being written, what
      came after that save, unless `in_flight` is 2 or more). It takes `in_flight` + 1 times the state's size of
      /dev/shm, from which saves are written too, and a restart on this machine resumes from it by itself. Of several
      ranks each seals what it holds, twice, at the same steps as the others, and all resume from there or none. None:
      never.
    - `memory_budget`: bytes of host memory that saving may use.
    - `encoding`: how bytes are stored: "plain" as they are; "dedupe" writes only what the checkpoint before has not;
      "small" also compresses it, without loss, and stores differences to the save before; "auto" compresses only where
      that makes saves faster; or an `Encoding`.
    - `key`: what opens the keys of a sealed repository (`tenuto key add`): a key file, `env:NAME`, or a function that
      returns a key or a passphrase. None: what the environment has (`TENUTO_KEY_FILE`). All that is saved there is
      sealed.
    - `capture`: "eager" copies the whole state before `save` returns; "fenced" copies what torch's optimizers own while
      the next forward and backward run, and the optimizer's step waits for the copy. Call `fence()` before code that
      writes these tensors by what torch does not count (`.data`, an array over their memory, a fused kernel of your
      own): where that happens now and then to a part of a tensor, it may go unnoticed, and the save holds two states.
    - `health`: whether saves look at the values that they write: what is NaN or infinite, norms, extremes, and how much
      has changed. A checkpoint in which leaves have become NaN or infinite is unhealthy: it is never best, and
      retention keeps the newest healthy one beside it. False: nothing is looked at.
    - `on_unhealthy`: what happens, at the next step, once such a save is committed or a logged metric that falls, such
      as a loss, jumps up or diverges: a function of a `tenuto.Unhealthy`, called on rank 0, or "stop", which ends the
      loop as `stop` does, of several ranks at a step that all can still agree on (not for a single jump). None: a
      warning of such a save.
    - `ranks`: the processes of this job, if torch.distributed does not know them (`tenuto.SharedFiles`). All of them
      give the same arguments, and save, tag and `stop` at the same steps; they agree on what only one can know (a
      clock, a signal, a metric).
    - `ranks_timeout`: seconds that ranks wait for one that is alive and late, before they raise.
    - `ranks_silence`: seconds without a sign of life after which a rank on another host counts as lost, and a stopped
      one (half of `ranks_timeout` at most). One that is killed is noticed at once by the ranks on its host. Raise it
      where a step on several hosts computes for longer without releasing Python's interpreter lock.
    - `writers`: who writes what several ranks hold: all of them, evenly ("balanced"); one rank each tensor ("tensor")
      or layer ("layer"); all, in parts of 16 MiB at most ("size"); the lowest rank that holds it ("one").
    - `emergency`: a directory or URL on another disk, or a list of them: where the last state goes, uncompressed, if
      the run's own store is full, fails, or has not got on for `emergency_after` seconds when training ends or leaves.
      The next start takes it over. All ranks share it. None: what the environment variable TENUTO_EMERGENCY says,
      divided by `;`.
    - `log`: which lines Tenuto prints on stderr (or gives the logger `tenuto`, if logging is configured): "default"
      (where training resumed from, damage that was passed over, waits, signals, failed saves), "saves" (a line for each
      committed save as well) or "silent". None: what the environment variable TENUTO_LOG says, else "default".
    - `sinks`: receive events: objects with `emit(event)`, or functions of an event.
    - `save_top_k`, `monitor`, `mode`, `save_last`, `max_to_keep`: names that other libraries have for `keep` (and, with
      `monitor` and no `save`, for `on.improve` in addition to the default).

    Raises UsageError for arguments that make no sense (PolicyConflict for policies that contradict each other),
    RanksError if other processes of the job are missing or disagree, Unserialisable (naming the path) for a state that
    cannot be represented, and errors of the store.
    """

    def __init__(
        self,
        where: Where,
        state: Mapping[str, Any],
        *,
        run: str = "main",
        data: Any = None,
        save: SavePolicy | Literal["auto"] | None = None,
        keep: KeepPolicy | None = None,
        resume_from: ResumeFrom = "latest",
        in_flight: int = 1,
        on_busy: OnBusy = "wait",
        on_error: OnError = "warn",
        takeover: bool = False,
        wait_for_owner: float | None = None,
        memory: SavePolicy | None = None,
        memory_budget: int | None = None,
        encoding: Encoding | Preset = "plain",
        key: KeySource | None = None,
        capture: Capture = "eager",
        health: bool = True,
        on_unhealthy: OnUnhealthy = None,
        ranks: Ranks | None = None,
        ranks_timeout: float = 600.0,
        ranks_silence: float = 15.0,
        writers: Strategy = "balanced",
        emergency: Places | None = None,
        emergency_after: float = AFTER_S,
        log: Log | None = None,
        sinks: Iterable[AnySink] = (),
        save_top_k: int | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        save_last: bool | None = None,
        max_to_keep: int | None = None,
    ) -> None:
        check_platform()
        self._closed, self._pid = False, os.getpid()
        self._training: TrainingSession | None = None
        if run_registry.imported_by_worker():
            return  # a worker imports its parent's script anew: this is not the training
        ranks = find_ranks(ranks)
        saving, keep = ArgumentAliases(save_top_k, monitor, mode, save_last, max_to_keep).policies(save, keep)
        settings = Settings.checked(
            state,
            run=run,
            save=saving,
            keep=keep,
            resume_from=resume_from,
            in_flight=in_flight,
            on_busy=on_busy,
            on_error=on_error,
            takeover=takeover,
            wait_for_owner=wait_for_owner,
            memory=memory,
            memory_budget=memory_budget,
            encoding=encoding,
            key=key,
            capture=capture,
            health=health,
            on_unhealthy=on_unhealthy,
            ranks_timeout=ranks_timeout,
            ranks_silence=ranks_silence,
            writers=writers,
            emergency=emergency,
            emergency_after=emergency_after,
        )
        sinks = listed(sinks)
        emitter = Emitter(sinks, console(log, sinks, rank=ranks.rank))
        with undisturbed:
            self._training = TrainingSession.create(where, state, data, ranks=ranks, settings=settings, emitter=emitter)
        self.prewarm_s = self._training.prewarm_s
        """Seconds that planning and taking memory took; 0 with several ranks."""
        self._withdraw = before_exit(_weakly(self._training))

    @classmethod
    def from_config(
        cls, state: Mapping[str, Any], path: str | os.PathLike[str] | None = None, **overrides: Any
    ) -> Self:
        """Returns the Checkpointer that a settings file says: `path`, else the one that the environment variable
        TENUTO_CONFIG names, else the first `tenuto.toml` from the working directory upwards.

        Variables such as TENUTO_SAVE__STEPS override the file, and `overrides`, which are arguments of a Checkpointer
        (`data=loader`, `run="b"`), override both, argument by argument. [Settings](settings.md) lists every key.
        Relative paths begin in the directory of the file.

        Raises UsageError, naming file and line, for keys that do not exist and for values that make no sense.
        """
        from tenuto.training.config.document import document, find
        from tenuto.training.config.objects import arguments

        return cls(**{"state": state, **arguments(document(find(path)), overrides.keys()), **overrides})

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._training.position.counters.step if self._training is not None else 0

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self._training.position.counters.epoch if self._training is not None else 0

    @property
    def stats(self) -> Stats:
        """What saving has done and cost so far: saves by how they ended, how long training was blocked, where the time
        of the last save and of a usual one went, how old the newest recoverable state is. `print` shows a table.

        Reads counters, and does no I/O. Available after `close` as well.
        """
        return self._training.saving.stats() if self._training is not None else Stats()

    def restore(self, *, strict: bool = True) -> Restored | None:
        """Restores what `resume_from` says, or what `peek` has shown, once; None if there is nothing to restore.

        `strict=False` restores what fits where the state's structure has changed, and leaves the rest as it is:
        `Restored.left` names it.

        Entries that are `tenuto.late()` are left alone; called once more when they are there, before the first step, it
        fills them from the same checkpoint.

        The run is claimed by `steps`, `epochs`, `step_done` or `save`; before that nothing is written, but for a state
        in memory that only together these ranks have, which is saved first. In a loop of your own, call
        `restore_random_state` where its first step begins, if anything draws before it. An earlier Checkpointer of this
        process that still owns the run is closed first, and saves nothing new. Raises NothingRestorable if checkpoints
        exist and none is whole, StateMismatch if the state's structure differs.
        """
        training = self._armed()
        with undisturbed:
            if training is None:
                return None
            restored = training.claiming.restore(strict=strict)
            training.claiming.report()
            training.first_save.begin()
            return restored

    def peek(self) -> Opened | None:
        """Opens the checkpoint that `restore` will take, before it touches anything; None if there is none.

        For a trainer that needs its counters before its objects exist: `peek().step`, `peek().plain("trainer")`. Every
        byte is verified, so what is damaged is passed over here, and `restore` takes this very checkpoint. What is read
        of one in memory is closed once the run is claimed; of several ranks' it has plain values only. Every rank calls
        it. Raises as `restore` does, and UsageError after it.
        """
        training = self._armed()
        if training is None:
            return None
        with undisturbed:
            return training.claiming.peek()

    def prepare(self) -> None:
        """Plans saves of the state as it is now, and takes the memory for them, so that the first save need not.

        For a state with entries that came late (`tenuto.late`): building the Checkpointer does this where all are
        there, and the first step where nothing has done it yet.
        """
        training = self._armed()
        if training is not None:
            with undisturbed:
                training.prepare()
                self.prewarm_s = training.prewarm_s

    def steps(self, n: int | None = None) -> Steps:
        """Replaces `range(n)`: `n` is the total, and a resumed run continues its count. Restores and claims when
        called."""
        total = count(n, "steps") if n is not None else None
        training = self._armed()
        if training is None:
            return Steps(NullTraining(), 0)
        with undisturbed:
            training.enter(self)
            if total is not None:
                end_at_once(training, training.step, total, "step")
            warn_of_epochs(training.saving)
            training.loop = loop = Steps(training, total)
        return loop

    def epochs(self, n: int, accumulate: int = 1) -> Epochs:
        """Yields epochs up to the total `n`; inside one, each batch taken from `batches` completes the step before it
        (`accumulate=k`: each k batches)."""
        total, group = count(n, "epochs"), count(accumulate, "epochs(accumulate=)", least=1)
        training = self._armed()
        if training is None:
            return Epochs(NullTraining(), 0, 1)
        with undisturbed:
            training.enter(self)
            training.loop = loop = Epochs(training, total, group)
            end_at_once(training, self.epoch, total, "epoch")
        return loop

    @property
    def batches(self) -> Batches:
        """`for`: the rest of this epoch; `next`: the next batch, rolling over. Only inside `steps` or `epochs`."""
        training = self._armed(needed=True)
        if training.loop is None:
            raise UsageError(
                "batches belongs inside steps() or epochs()",
                subject="batches",
                hint="for step in ckpt.steps(n): batch = next(ckpt.batches)",
            )
        return Batches(training, training.loop if isinstance(training.loop, Epochs) else None)

    def log(self, *, tag: str | Iterable[str] | None = None, **metrics: Any) -> None:
        """Logs metrics of the open step; outside, of the last completed one (noted if its save is taken already).

        tag: a name for that step, or several. A tagged step is saved (at its end; outside a step as by `save`), and
        kept until the tag is moved, by giving it to another step, or taken off. `load`, `resume_from` and
        `--step` take a tag for a step. Tags are the repository's, not the run's: one name means one checkpoint.
        """
        training = self._armed()
        if training is None:
            return
        tags, floats = tag_names(tag), as_floats(metrics)
        with undisturbed:
            if tags and not training.open:
                training.claim_to_save(self)
            training.log(floats)
            if tags:
                training.tag(tags)

    def step_done(
        self, step: int | None = None, *, epoch: int | None = None, epoch_ended: bool | None = None, **metrics: Any
    ) -> None:
        """Completes a step, in a loop of your own; `step` is its number, else one more than the last.

        `epoch_ended`: whether it was the last of its epoch, given at every step for `every(epochs=)` to save there.
        `epoch`: the number of completed epochs, with this one if it ends here; by default each `epoch_ended` counts one
        more. Metrics that are None are left out.

        Nothing here counts the batches that such a loop takes. Its position in the data is known only if `data`, or an
        entry of the state, counts by itself (`state_dict`, `load_state_dict`); else the certificate says that the
        resume is not exact.
        """
        training = self._armed()
        if training is None:
            return
        if training.loop is not None:
            raise UsageError(
                "step_done is for loops of your own; steps() and epochs() count by themselves",
                subject="step_done",
                hint="leave the call out",
            )
        with undisturbed:
            if training.saving.attempt is None and not training.claim_to_count(self):
                return
            number = training.step + 1 if step is None else count(step, "step_done(step=)")
            if number <= training.step:
                raise UsageError(
                    f"step {number} is not above the last completed one, {training.step}",
                    subject="step_done",
                    hint="pass the number of completed steps; after ckpt.restore() continue from ckpt.step",
                )
            done = count(epoch, "step_done(epoch=)") if epoch is not None else None
            training.step_done(number, as_floats(metrics), done, epoch_ended)

    def batch_done(self, *, epoch_ended: bool = False, why: str = "") -> None:
        """Notes a batch that has completed no step, in a loop of somebody else's.

        For adapters whose trainer counts the steps: `step_done` is called where its count has risen, and this where it
        has not. If it never rises, nothing is ever saved; one line says so once a save would have been due, with
        `why` and what to do.
        """
        training = self._armed()
        if training is not None:
            training.first_save.batch(epoch_ended=epoch_ended, why=why)

    def restore_random_state(self) -> None:
        """Restores the random generators once more: for a loop of your own, right before its first step.

        `restore` restores them too, but what draws between it and the first step (a trainer's checks, the making of a
        loader's iterator) moves them on. `steps` and `epochs` do this by themselves. Does nothing where nothing was
        restored. Raises UsageError before `restore` and once a step is completed.
        """
        training = self._armed()
        if training is not None:
            training.restore_random_state()

    def save(self, wait: bool = False) -> Save:
        """Saves now, or at the end of the open step; behind the batches of an epoch, at the end of its body, whose rest
        a resume would otherwise run again. `wait=True` returns (or ends the step) once committed.

        If no step was completed since the last save, returns that save, with a warning. With `wait`, raises what made
        it fail; always raises Superseded and RunInUse.
        """
        training = self._armed(needed=True)
        with undisturbed:
            training.claim_to_save(self)
            return training.save(wait=wait)

    def fence(self) -> None:
        """Waits until everything that a fenced save copies in the background is copied.

        Call it before changing parameters or optimizer state by other means than an optimizer's step. Costs nothing if
        nothing is being copied.
        """
        training = self._armed()
        if training is not None:
            with undisturbed:
                training.saving.saver.release_fence()

    def stop(self) -> None:
        """Has the loop end after the open step, with a save."""
        training = self._armed()
        if training is not None:
            training.stopping = True

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the saves in flight and for retention after them; raises what made the last one fail, and
        DeadlineExceeded after `timeout` seconds (without one, after ten minutes without progress)."""
        training = self._armed()
        if training is None:
            return
        with undisturbed:
            training.saving.wait(timeout)
        last = training.saving.last
        if last is not None and last.error is not None:
            raise last.error

    def close(self, timeout: float = CLOSE_DEADLINE_S, *, failed: BaseException | None = None) -> None:
        """Waits for what is in flight, releases the run, restores signal handlers. May be called twice. The end of a
        `with` does the same, but signals without a handler of yours still leave with 128 + n.

        failed: what has ended training, where a trainer reports it instead of raising it through `with`: then nothing
        new is saved, and the other ranks hear of it.
        """
        training = self._training
        if self._closed or training is None or os.getpid() != self._pid:
            return
        with undisturbed:  # one block: a signal that came with `failed` does not take its place
            if failed is not None:
                training.saving.heartbeat.failed(failed)
                training.saving.group.broken_off(failed)
                save_sealed(training.saving)
            self._closed = True
            self._withdraw()
            training.close(timeout, ended_well=failed is None, failed=failed)

    def latest_step(self) -> int | None:
        """Returns the committed step that `latest` means in this run now; None if there is none."""
        training = self._armed()
        with undisturbed:  # a signal that comes here waits: it saves to the same store
            newest = latest(training.saving.repo, training.run) if training is not None else None
        return newest.step if newest is not None else None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
            leaving_with(error.code)
        if self._training is not None:
            self._training.stays = True
        self.close(failed=error)

    def __repr__(self) -> str:
        if self._training is None:
            return "Checkpointer(disarmed)"
        return f"Checkpointer({self._training.saving.repo.url!r}, run={self._training.run!r}, step={self.step})"

    @overload
    def _armed(self, *, needed: Literal[True]) -> TrainingSession: ...

    @overload
    def _armed(self) -> TrainingSession | None: ...

    def _armed(self, *, needed: bool = False) -> TrainingSession | None:
        """Returns the session; None in a worker that imports the script anew (UsageError if it is `needed`)."""
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"this Checkpointer belongs to process {self._pid}; this is its forked child {os.getpid()}",
                subject=repr(self),
                hint="use it in the process that built it, or build another one on another run",
            )
        if self._training is None and needed:
            raise UsageError(
                "this Checkpointer was built while a worker imported the main module; it does nothing",
                hint='put the training under if __name__ == "__main__":',
            )
        if self._closed or (self._training is not None and self._training.closed):
            raise UsageError(
                "this Checkpointer is closed",
                subject=repr(self),
                hint="build a new one: it resumes from the last checkpoint",
            )
        return self._training


def _weakly(training: TrainingSession) -> Callable[[], None]:
    """Returns a function that closes `training` at the process's end if it still exists, without keeping it alive until
    then. The registry of runs keeps a session that owns one."""
    session, pid = weakref.ref(training), os.getpid()

    def close() -> None:
        found = session()
        if found is not None and os.getpid() == pid:
            # Training may not have ended well, and no thread can be started any more: only waits for what is in flight.
            found.close(CLOSE_DEADLINE_S, ended_well=False)

    return close
