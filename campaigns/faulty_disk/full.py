"""Real file systems that fill up, or turn read-only, while a save is written: a tmpfs, and ext4 on a loop device.

Each is made in a mount namespace of its own, by root or in a user namespace, and is gone with it. A place that cannot
be made on this machine is skipped, and says why.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from tenuto.api.save_load import load
from tenuto.crashpoints import armed
from tenuto.engine.save import save_writer as engine_writing
from tenuto.errors import CheckpointNotFound, SaveFailed, TenutoError
from tenuto.maintenance.verify import execute, plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.policy.save import every
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store
from tenuto.training import exit_status
from tenuto.training.checkpointer import Checkpointer

MIB: Final = 1 << 20
SIZES: Final = {"tmpfs": 4 * MIB, "ext4": 16 * MIB}
STATE_BYTES: Final = 500_000
STAGES: Final = (
    "before",
    "save begun",
    "pack durable, index not yet",
    "packs and indexes durable, manifest not yet",
    "manifest durable, not yet reported",
)
SPARES: Final = (0, 4096, 3 * 4096, 100_000, 450_000)
"""Bytes that are left free when the disk fills up."""
_SLACK: Final = 64 << 10
"""What saving asks for beside the packs, on file systems of a few MiB."""


@dataclass
class Filled:
    """One training on one file system. `said`: what came of it; `skipped`: why it could not be tried."""

    place: str
    stage: str = ""
    spare: int = 0
    on_error: str = ""
    said: str = ""
    skipped: str = ""
    violations: list[str] = field(default_factory=list)


@dataclass
class _Disk:
    """A mounted file system that can be filled to the last byte, and emptied again."""

    root: Path

    @property
    def ballast(self) -> Path:
        return self.root / "ballast"

    def free(self) -> int:
        place = os.statvfs(self.root)
        return place.f_bavail * place.f_frsize

    def fill(self, spare: int) -> None:
        """Writes until `spare` bytes are free, rounded to blocks."""
        with open(self.ballast, "ab", buffering=0) as file:
            for piece in (65536, 4096, 512):
                while self.free() >= spare + piece:
                    try:
                        file.write(bytes(piece))
                    except OSError:
                        break

    def empty(self) -> None:
        self.ballast.unlink(missing_ok=True)

    def remount(self, how: str) -> None:
        for _ in range(50):  # a beat of the lease may just hold a file open
            done = subprocess.run(["mount", "-o", f"remount,{how}", str(self.root)], check=False, capture_output=True)
            if done.returncode == 0:
                return
        raise OSError(done.stderr.decode().strip())


class _Fills:
    """Takes the engine's events, and what goes wrong when."""

    def __init__(self, act: Callable[[], None], stage: str) -> None:
        self.act, self.stage, self.armed_for = act, stage, 0
        self.saving = 0

    def emit(self, event: Any) -> None:
        if type(event).__name__ == "SaveStarted":
            self.saving = event.id.step
            if self.stage == "before" and self.saving == self.armed_for:
                self.act()

    def reached(self) -> None:
        if self.saving == self.armed_for:
            self.act()


def train(disk: _Disk, filled: Filled, act: Callable[[], None], undo: Callable[[], None]) -> None:
    """Two saves; a third during which `act` happens; a fourth; then `undo`, and a fifth, by the same process."""
    place = disk.root / "checkpoints"
    state = {"w": np.zeros(STATE_BYTES // 4, np.float32), "n": 0}
    fills = _Fills(act, filled.stage)
    problems = filled.violations
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(engine_writing, "SMALL_OBJECTS_BYTES", _SLACK))
        if filled.stage != "before":
            stack.enter_context(armed(filled.stage, fills.reached))
        rounds = _rounds_by_writer(stack)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        ckpt = Checkpointer(
            place,
            state,
            save=every(steps=1),
            keep=keep.latest(2),
            on_error=filled.on_error,  # type: ignore[arg-type]
            sinks=[fills],
        )
        ckpt.restore()
        good = [step for step in (1, 2) if _step(ckpt, state, step, problems) is None]
        fills.armed_for = 3
        failures = [_step(ckpt, state, 3, problems)]
        fills.armed_for = 0
        third = failures[0] is None
        if not third and len(rounds) > 1:
            problems.append(f"retention ran {len(rounds)} times for one save")
        problems += _standing(ckpt, [3] if third else good, failed=not third)
        failures.append(_step(ckpt, state, 4, problems))
        problems += _whole(place, [step for step, it in ((3, failures[0]), (4, failures[1])) if it is None] or good)
        undo()
        last = _step(ckpt, state, 5, problems)
        if last is not None:
            problems.append(f"there is room again, and the save failed: {last!r}")
        problems += _standing(ckpt, [5], failed=False)
        ckpt.close(20)
    problems += _whole(place, [5])
    if "read-only" in filled.place:
        _claim_anew(place)  # nothing could be removed at the time: the next claim frees it
    problems += _litter(place)
    lost = [f"{3 + number} ({_cause(error)})" for number, error in enumerate(failures) if error is not None]
    filled.said = f"steps that failed: {', '.join(lost) or 'none'}; then saved again"


def _claim_anew(place: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpointer(place, {"w": np.zeros(STATE_BYTES // 4, np.float32), "n": 0}) as ckpt:
            len(ckpt.steps(5))


def _step(ckpt: Checkpointer, state: dict[str, Any], step: int, problems: list[str]) -> TenutoError | None:
    """One step and its save; why it failed, or None. With `on_error="raise"` the failure is raised at the next call."""
    state["w"] += np.float32(step)
    state["n"] = step
    try:
        ckpt.step_done(step)
    except SaveFailed as error:
        if ckpt._training.saving._on_error != "raise":  # type: ignore[union-attr]
            problems.append(f'training was ended by {error!r}, although on_error is "warn"')
        return _again(ckpt)
    return _wait(ckpt)


def _again(ckpt: Checkpointer) -> TenutoError | None:
    """What a training does that was told: it goes on, and saves."""
    try:
        ckpt.save()
    except TenutoError as error:
        return error
    return _wait(ckpt)


def _wait(ckpt: Checkpointer) -> TenutoError | None:
    try:
        ckpt.wait(60)
    except TenutoError as error:
        return error
    return None


def _cause(error: TenutoError) -> str:
    return type(error.__cause__ or error).__name__


def _rounds_by_writer(stack: ExitStack) -> list[int]:
    """Counts the rounds of retention that a save asks for because it finds no room."""
    from tenuto.training.saves import RunSaver

    rounds: list[int] = []
    original = RunSaver._make_room

    def make_room(self: RunSaver) -> bool:
        rounds.append(1)
        return original(self)

    stack.enter_context(mock.patch.object(RunSaver, "_make_room", make_room))
    return rounds


def _standing(ckpt: Checkpointer, steps: list[int], *, failed: bool) -> list[str]:
    failure = "; ".join(exit_status._ending.failures.values()) or None
    if failed and failure is None:
        return ["a save failed, and the exit status would be 0"]
    if not failed and failure is not None:
        return [f"step {steps[-1]} is saved, and the exit status would not be 0: {failure}"]
    return []


def _whole(place: Path, steps: list[int]) -> list[str]:
    """What is wrong with the newest checkpoint, which has to be that of the last of `steps`, and with all that is
    there."""
    problems = []
    found = load(place)
    step = found.state["n"]
    wanted = np.zeros(STATE_BYTES // 4, np.float32)
    for number in range(1, step + 1):
        wanted += np.float32(number)
    if step != steps[-1]:
        problems.append(f"latest is step {step}, not {steps[-1]}")
    if found.state["w"].tobytes() != wanted.tobytes():
        problems.append(f"step {step} does not hold what was saved")
    repo = Repo.open(open_store(place))
    problems += [f"verify: {finding}" for finding in execute(repo, plan_verify(repo)).errors]
    return problems


def _litter(place: Path) -> Iterator[str]:
    """Files that belong to no checkpoint and are none of the records that stay."""
    repo = Repo.open(open_store(place))
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        parts = name.split("/")
        if path.is_dir() or (".tmp-" not in name and (len(parts) < 5 or parts[3] == "lease")):
            continue
        id = CheckpointId(parts[1], int(parts[2][1:]), int(parts[3][5:])) if parts[3].startswith("step-") else None
        if ".tmp-" in name or id is None or (not repo.exists(id) and name != id.manifest):
            yield f"{name} is litter"


def retention_makes_room(disk: _Disk) -> Filled:
    """Three old checkpoints, a policy that keeps one, and no room for another: retention runs, and the save goes on."""
    filled = Filled("", "retention makes room")
    place = disk.root / "checkpoints"
    with warnings.catch_warnings(), mock.patch.object(engine_writing, "SMALL_OBJECTS_BYTES", _SLACK):
        warnings.simplefilter("ignore")
        state = {"w": np.zeros(STATE_BYTES // 4, np.float32), "n": 0}
        with Checkpointer(place, state, save=every(steps=1), keep=keep.all()) as before:
            before.restore()
            for step in (1, 2, 3):
                _step(before, state, step, filled.violations)
        disk.fill(100_000)
        with Checkpointer(place, state, save=every(steps=1), keep=keep.latest(1)) as ckpt:
            ckpt.restore()
            failed = _step(ckpt, state, 4, filled.violations)
            if failed is not None:
                filled.violations.append(f"retention could make room, and the save failed: {failed!r}")
    disk.empty()
    filled.violations += _whole(place, [4])
    filled.violations += _litter(place)
    filled.said = "saved, after retention had made room"
    return filled


def trials(kind: str) -> list[Filled]:
    trials = [
        Filled(kind, stage, spare, on_error)
        for stage in STAGES
        for spare in SPARES
        for on_error in ("warn", "raise")
        if spare in (0, 4096) or on_error == "warn"
    ]
    return [*trials, *(Filled(f"{kind}, read-only", stage, 0, "warn") for stage in STAGES)]


def run_here(kind: str, root: Path, some: int) -> list[Filled]:
    """All trials (or every `some`th) on file systems mounted at `root`; for a process in a mount namespace of its
    own."""
    done = []
    for filled in trials(kind)[::some]:
        disk = _mounted(kind, root)
        try:
            if "read-only" in filled.place:
                train(disk, filled, lambda: disk.remount("ro"), lambda: disk.remount("rw"))  # noqa: B023
            else:
                train(disk, filled, lambda: disk.fill(filled.spare), disk.empty)  # noqa: B023
        except (TenutoError, OSError, CheckpointNotFound) as error:
            filled.violations.append(f"the training itself ended with {error!r}")
        finally:
            exit_status._ending.failures.clear()
            subprocess.run(["umount", "-l", str(root)], check=True)
        done.append(filled)
    disk = _mounted(kind, root)
    filled = retention_makes_room(disk)
    filled.place = kind
    subprocess.run(["umount", "-l", str(root)], check=True)
    return [*done, filled]


def _mounted(kind: str, root: Path) -> _Disk:
    root.mkdir(exist_ok=True)
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZES[kind]}", "none", str(root)]
    else:
        image = root.with_suffix(".img")
        image.unlink(missing_ok=True)
        with open(image, "wb") as file:
            file.truncate(SIZES[kind])
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(image)], check=True)
        command = ["mount", "-o", "loop", str(image), str(root)]
    subprocess.run(command, check=True, capture_output=True)
    return _Disk(root)


def fill_all(some: int = 1, kinds: tuple[str, ...] = ("tmpfs", "ext4")) -> list[Filled]:
    """The trials of every kind of place that can be made here; one that says why, of each that cannot."""
    found = []
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="tenuto-full-") as place:
            found += _apart(kind, Path(place), some)
    return found


def _apart(kind: str, place: Path, some: int) -> list[Filled]:
    """Runs the trials of one kind in a process with a mount namespace of its own."""
    flags = ["-m"] if os.getuid() == 0 else ["-r", "-m"]
    told = place / "told.json"
    command = ["unshare", *flags, sys.executable, "-m", "campaigns.faulty_disk.full", kind, str(place / "disk")]
    try:
        done = subprocess.run(
            [*command, str(told), str(some)], check=False, capture_output=True, text=True, timeout=900
        )
    except FileNotFoundError:
        return [Filled(kind, skipped="there is no `unshare` here")]
    if not told.exists():
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [Filled(kind, skipped=f"cannot be mounted here: {last}")]
    return [Filled(**one) for one in json.loads(told.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("root", type=Path)
    parser.add_argument("told", type=Path)
    parser.add_argument("some", type=int)
    given = parser.parse_args()
    found = run_here(given.kind, given.root, given.some)
    given.told.write_text(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    main()
