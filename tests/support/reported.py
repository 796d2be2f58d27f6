"""Repositories that a report has something to say about, made in a second: the clock is the test's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np

from tenuto.concurrency.process import this_process
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.model.ids import CheckpointId
from tenuto.repo import repository
from tenuto.repo.notes import add_note
from tenuto.repo.ownership import claim as claims
from tenuto.repo.ownership.claim import Attempt, claim
from tenuto.repo.refs import put_ref
from tenuto.repo.repository import Repo
from tenuto.report import facts
from tenuto.state.encode.flattener import flatten
from tenuto.store.contract import Store
from tenuto.store.registry import open_store

BEGIN = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)
LONG = "x" * 95
"""A tag that fits no screen."""
TIMING = {"look_s": 0.0004, "wait_s": 0.01, "capture_s": 0.034, "write_s": 2.1, "commit_s": 0.012}
CERTIFICATE = {"verdict": "no known gap", "modes": {"val_loss": "min"}}


@dataclass
class Made:
    """A repository whose clock stands where its last save left it."""

    where: Path | Store
    now: datetime = BEGIN
    every: timedelta = timedelta(minutes=10)
    attempts: list[Attempt] = field(default_factory=list)
    """Kept, so that those that are not released are still trained."""
    repo: Repo = field(init=False)

    def __post_init__(self) -> None:
        self.repo = Repo.create_or_open(open_store(self.where) if isinstance(self.where, Path) else self.where)

    @contextmanager
    def clock(self) -> Iterator[None]:
        """The repository's clock, and the report's, are this one."""
        with (
            mock.patch.object(repository, "datetime", mock.Mock(now=lambda zone: self.now)),
            mock.patch.object(facts, "clock", lambda: self.now.timestamp()),
        ):
            yield

    def save(
        self,
        run: str,
        steps: Sequence[int],
        parent: CheckpointId | None = None,
        *,
        metrics: Mapping[int, Mapping[str, float]] | None = None,
        certificate: Mapping[str, Any] = CERTIFICATE,
        ends: Literal["released", "dead", "never"] = "released",
    ) -> CheckpointId:
        """Saves one attempt's steps, and returns the newest. metrics: of a step, beside `val_loss` and `lr`. ends: what
        becomes of the process that saved them."""
        owner = this_process() if ends != "dead" else replace(this_process(), pid=2**22, started="1")
        with self.clock(), mock.patch.object(claims, "this_process", lambda: owner):
            attempt = claim(self.repo, run, parent)
            saver = Saver(self.repo, run)
            saver.attempt = attempt
            for step in steps:
                self.now += self.every
                loss = 3.0 * (step + 5) ** -0.35 + 0.01 * (step % 3)
                found = {"val_loss": loss, "lr": 1e-3, **(metrics or {}).get(step, {})}
                about = ManifestDetails(parent, found, {"step": step}, {"timing": TIMING}, certificate)
                state = {"w": np.full(64, step, np.float32), "n": step}
                saver.save(flatten(state), step, wait=True, about=about).wait()
                parent = CheckpointId(run, attempt.number, step)
            if ends == "released":
                attempt.release()
            self.attempts.append(attempt)
            saver.close()
        assert parent is not None
        return parent

    def note(self, id: CheckpointId, kind: str) -> None:
        with self.clock():
            add_note(self.repo, id, kind, {})

    def report(self, runs: Sequence[str] | None = None) -> facts.Report:
        with self.clock():
            return facts.report(self.repo, runs)


def eventful(where: Path, name: str = "loss") -> Made:
    """Two runs: `gpt` had a spike and NaN, went back, and lost a data file; `small` was forked from it. name: of one
    of its metrics."""
    made = Made(where)
    usual = {step: {name: 1.0 + 0.001 * (step % 7)} for step in range(1, 100)}
    made.save("gpt", range(1, 31), metrics=usual)
    broken = {**usual, 35: {name: 50.0}, **{step: {name: float("nan")} for step in (39, 40)}}
    made.save("gpt", range(31, 41), CheckpointId("gpt", 1, 30), metrics=broken)
    made.save("gpt", range(35, 61), CheckpointId("gpt", 2, 34), metrics=usual)
    made.save("small", range(51, 56), CheckpointId("gpt", 3, 50), metrics=usual)
    made.note(CheckpointId("gpt", 3, 60), "verified")
    put_ref(made.repo, "tag", "best-yet", CheckpointId("gpt", 1, 20))
    put_ref(made.repo, "tag", LONG, CheckpointId("small", 1, 51))
    put_ref(made.repo, "pin", "paper", CheckpointId("gpt", 1, 10))
    cut(made, CheckpointId("gpt", 1, 5))
    return made


def cut(made: Made, id: CheckpointId) -> None:
    """Cuts the checkpoint's data file, as a full disk would."""
    assert isinstance(made.where, Path)
    pack = made.where / id.directory / "rank-00000.safetensors"
    pack.write_bytes(pack.read_bytes()[:100])
