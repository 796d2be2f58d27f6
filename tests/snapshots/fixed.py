"""A repository that is the same in every byte wherever and whenever it is made: ids, times and owner are fixed."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from support.saves_of_ranks import save_jointly
from tenuto import units
from tenuto.cli.views import ages, drill_page, save_timing  # noqa: F401 - imported by now
from tenuto.concurrency import process
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.maintenance import status
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Owner
from tenuto.repo import repository, tombstones
from tenuto.repo.notes import add_note
from tenuto.repo.ownership import claim as claims
from tenuto.repo.ownership.claim import claim
from tenuto.repo.refs import put_ref
from tenuto.repo.repository import Repo
from tenuto.report import facts as report
from tenuto.state.encode.flattener import flatten
from tenuto.store.local.store import LocalStore
from tenuto.store.registry import open_store

PLACE = "/data"
"""What the directory that holds everything is called in all that is shown, so that its length moves no line."""
BEGIN = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
OWNER = Owner("node-7", "boot", "pid:[1]", 1234, "5678", "ada")
CERTIFICATE = {
    "exact": False,
    "verdict": "not exact",
    "reasons": ["data: the position of a generator cannot be saved; a resume begins it anew"],
    "caveats": ["model: gradients are not saved; they matter where they are not cleared before the next backward"],
    "covers": ["model", "optimizer", "scheduler", "step and epoch", "random generators of python"],
    "leaves_out": ["train or eval mode of modules", "the data set's own bytes"],
    "versions": {"tenuto": "0.1.0", "numpy": "2.4.6", "python": "3.11.7"},
    "watches": {"loss": "keep.best(1, 'loss', mode='min')"},
    "modes": {"loss": "min"},
}
ENVIRONMENT = {"tenuto": "0.1.0", "numpy": "2.4.6", "platform": "Linux x86_64", "python": "3.11.7"}

TIMING = {
    "look_s": 0.0004,
    "wait_s": 0.25,
    "prepare_s": 0.0021,
    "capture_s": 0.034,
    "late_s": 0.21,
    "begin_s": 0.0018,
    "digest_s": 0.012,
    "write_s": 0.5,
    "index_s": 0.0019,
    "cpu_s": 0.021,
}
"""As a Checkpointer's saves say it; that of step 6 is no object, as another program may have written it."""


class Clock:
    """One minute passes from reading to reading."""

    def __init__(self) -> None:
        self._minutes = itertools.count()

    def now(self, zone: Any) -> datetime:
        return BEGIN + timedelta(minutes=next(self._minutes))


@contextlib.contextmanager
def fixed_identity() -> Iterator[None]:
    """Ids count from 1, the clock ticks by itself, and one owner does everything."""
    ids = itertools.count(1)
    digits = lambda: f"{next(ids):032x}"  # noqa: E731
    with contextlib.ExitStack() as patches:
        for module in (claims, process, tombstones):
            patches.enter_context(mock.patch.object(module, "this_process", lambda: OWNER))
        patches.enter_context(mock.patch("secrets.token_hex", lambda count: digits()[-2 * count :]))
        patches.enter_context(mock.patch.object(uuid, "uuid4", lambda: SimpleNamespace(hex=digits())))
        patches.enter_context(mock.patch.object(repository, "datetime", Clock()))
        yield


def show_fixed_places(real: Path) -> None:
    """For a child that prints: stores lie below PLACE, as far as anyone is told, it is the next morning, and what a
    command has measured is as long in words on every machine, since lines break by it."""
    ages.clock = status.clock = report.clock = (BEGIN + timedelta(hours=9)).timestamp
    LocalStore.url = property(lambda store: store.root.replace(str(real), PLACE))  # type: ignore[assignment]
    # Commands import it where they tell of what they did; the pages of what was recorded have imported it by now.
    units.seconds = lambda duration: "12.5 ms"


def layers(scale: float) -> dict[str, Any]:
    rng = np.random.Generator(np.random.PCG64(0))
    return {
        f"layers.{number}.{name}": (scale * rng.random(shape)).astype(np.float32)
        for number in range(2)
        for name, shape in (("weight", (256, 64)), ("bias", (256,)))
    }


def state(step: int) -> dict[str, Any]:
    model = layers(step)
    moments = {
        name: {"step": step, "exp_avg": value * np.float32(0.1), "exp_avg_sq": value**2}
        for name, value in model.items()
    }
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), "weight_decay": 0.01}]},
        "scheduler": {"last_epoch": step, "base_lrs": [0.001], "eta_min": 0.0},
        "config": {"name": "gpt-tiny", "tied": True, "seen": step * 12, "floor": float("-inf")},
    }


def save(repo: Repo, run: str, steps: list[int], *, parent: CheckpointId | None = None, whole: Any = None) -> None:
    """One attempt, as a training loop would make it."""
    attempt = claim(repo, run, parent)
    saver = Saver(repo, run)
    saver.attempt = attempt
    for step in steps:
        metrics = {"loss": 1 / step, "lr": 0.001, "val_loss": float("nan") if step == 6 else 0.5}
        told: dict[str, Any] = {"timing": "soon" if step == 6 else {**TIMING, "write_s": step / 8}} if step > 2 else {}
        progress = {"step": step, "epoch": 0, "batch": step}
        about = ManifestDetails(parent, metrics, progress, {**ENVIRONMENT, **told}, CERTIFICATE)
        saver.save(flatten(state(step) if whole is None else whole), step, wait=True, about=about).wait()
        parent = CheckpointId(run, attempt.number, step)
    attempt.release()
    saver.close()


def make(where: Path) -> None:
    """Run `gpt`: trained to step 8, then again from step 4. Run `small`: one checkpoint."""
    with fixed_identity():
        repo = Repo.create_or_open(open_store(where))
        save(repo, "gpt", [2, 4, 6, 8])
        save(repo, "gpt", [5, 7], parent=CheckpointId("gpt", 1, 4))
        add_note(repo, CheckpointId("gpt", 2, 5), "verified", {"every_byte": True})
        add_note(repo, CheckpointId("gpt", 2, 7), "metric", {"accuracy": 0.25})
        put_ref(repo, "tag", "baseline", CheckpointId("gpt", 1, 6))
        save(repo, "small", [1], whole={"x": np.arange(5)})


def make_ranks(where: Path) -> None:
    """Two checkpoints that three ranks have saved."""
    with fixed_identity(), mock.patch.object(repository, "datetime", SimpleNamespace(now=lambda zone: BEGIN)):
        save_jointly(Repo.create_or_open(open_store(where)), 3, session="5" * 32)


def make_empty(where: Path) -> None:
    """A repository that nobody has saved to."""
    with fixed_identity():
        Repo.create_or_open(open_store(where))


def make_hostile(where: Path) -> None:
    """Names and texts that would move a terminal's cursor, recolour it, or turn the writing round."""
    red, turned, title = "\x1b[31mred\x1b[0m", "cat\u202egnp.exe", "\x1b]0;owned\x07"
    with fixed_identity():
        repo = Repo.create_or_open(open_store(where))
        whole = {red: np.zeros(3, np.float32), "text": title, turned: {"tab\there": 1, "line\nbreak": 2}}
        attempt = claim(repo, "main", None)
        saver = Saver(repo, "main")
        saver.attempt = attempt
        about = ManifestDetails(None, {red: 1.5}, {"step": 1}, {"python": turned}, {"exact": False, "reasons": [title]})
        saver.save(flatten(whole), 1, wait=True, about=about).wait()
        attempt.release()
        saver.close()
