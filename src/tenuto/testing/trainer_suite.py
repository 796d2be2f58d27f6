"""What a trainer's adapter has to keep, as tests: subclass `TrainerSuite` and give a training script.

    class TestMine(TrainerSuite):
        script = Path(__file__).with_name("train_mine.py")

The script takes `--where DIR --out FILE`, and where asked `--resume-from STEP` and `--every-step`. It

- trains plainly, without Tenuto, where DIR is empty; else resumes by itself from what lies there,
- prints a line `step N` (flushed) after each completed step, as soon as Tenuto has counted it,
- passes `--resume-from` on as a number, and with `--every-step` saves every step and keeps them all (`keep.all()`),
- writes FILE at its end: `{"digest": {name: hex digest}, "history": …}`. `digest` has every final tensor and generator,
  `history` what else is equal where nothing was interrupted: losses, counters, early stopping, the best score.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Final, Protocol

import pytest

import tenuto

SHOWN: Final = 8
"""Differences that a failure lists."""
TAIL: Final = 3000
"""Characters of a script's stderr that a failure shows."""


class Process(Protocol):
    """What is asked of a running script: `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def stdout(self) -> IO[Any] | None: ...

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class TrainerSuite:
    """The tests. Each compares a way through the training with one that nothing interrupted."""

    script: ClassVar[Path]
    options: ClassVar[Sequence[str]] = ()
    """Further arguments of the script."""
    command: ClassVar[Sequence[str]] = (sys.executable,)
    """What runs the script, such as `torchrun --nproc-per-node 2`."""
    preload: ClassVar[Sequence[str]] = ()
    """Modules that take long to import, such as `torch._dynamo`, which torch's optimizers import at their first step.
    The sweep imports them once and forks a process for each resume: not for a framework that starts threads at its
    import."""
    kills: ClassVar[int] = 2
    seed: ClassVar[int] = 0
    every: ClassVar[int] = 1
    """The sweep resumes from every so many saved steps, and from the last one."""
    ignored: ClassVar[Sequence[str]] = ()
    """Names of the digest that may differ, with a reason beside them in the subclass."""
    repeats_itself: ClassVar[bool] = True
    """False for a trainer whose runs differ without any interruption: then `certify` is not asked."""
    again: ClassVar[Sequence[float]] = (0.25, 0.5)
    """After these parts of the training it is resumed, killed, and resumed from what the resumed one has saved."""
    certify_steps: ClassVar[Sequence[int]] = (3,)
    """The steps after which `tenuto certify` kills and resumes."""
    deadline_s: ClassVar[float] = 240.0
    """For one run of the script."""
    environment: ClassVar[Mapping[str, str]] = {}
    _plain: ClassVar[dict[str, Any]]
    _every_step: ClassVar[tuple[Path, dict[str, Any]]]

    # -- the ways

    @pytest.fixture
    def plain(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        """What the training comes to without Tenuto."""
        if "_plain" not in vars(type(self)):  # one run for all tests of a class
            type(self)._plain = self.run("", tmp_path_factory.mktemp("plain"))
        return self._plain

    @pytest.fixture
    def every_step(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
        """A training with every step saved, and what it comes to."""
        if "_every_step" not in vars(type(self)):
            directory = tmp_path_factory.mktemp("every")
            type(self)._every_step = directory / "saved", self.run(directory / "saved", directory, "--every-step")
        return self._every_step

    def test_training_with_tenuto_is_the_training_without(
        self, plain: dict[str, Any], every_step: tuple[Path, dict[str, Any]]
    ) -> None:
        self.same(every_step[1], plain, "with Tenuto, uninterrupted")

    def test_a_training_that_is_killed_comes_to_the_same(self, plain: dict[str, Any], tmp_path: Path) -> None:
        dice, steps = random.Random(self.seed), self._steps(plain)
        for number in range(self.kills):
            life = Life(self, tmp_path / "saved", tmp_path, f"killed{number}")
            life.until(dice.randint(1, max(steps // 2, 1)))
            life.wait_within_step(dice.random())
            life.end(signal.SIGKILL)
        self.same(self.run(tmp_path / "saved", tmp_path), plain, f"killed {self.kills} times (seed {self.seed})")

    def test_it_resumes_from_each_step(
        self, plain: dict[str, Any], every_step: tuple[Path, dict[str, Any]], tmp_path: Path
    ) -> None:
        """Random kills miss what is wrong at single steps: the last of an epoch, one before an evaluation."""
        saved = sorted(one.step for one in tenuto.Repository(every_step[0]).checkpoints())
        assert saved, "the script saves every step when it is asked to"
        chosen = [step for step in saved if step % self.every == 0 or step == saved[-1]]
        wrong = []
        for step, found in self.sweep(every_step[0], chosen, tmp_path):
            if differences := self.differences(found, plain):
                wrong.append(f"resumed from step {step}: {'; '.join(differences[:2])}")
        assert not wrong, f"{len(wrong)} of {len(chosen)} resumes differ:\n" + "\n".join(wrong[:SHOWN])

    def test_it_resumes_from_what_a_resumed_one_has_saved(
        self, plain: dict[str, Any], every_step: tuple[Path, dict[str, Any]], tmp_path: Path
    ) -> None:
        """What is restored right may be kept wrong for the saves that follow."""
        saved = sorted(one.step for one in tenuto.Repository(every_step[0]).checkpoints())
        for part in self.again:
            step = max((one for one in saved if one <= part * self._steps(plain)), default=saved[0])
            where = shutil.copytree(every_step[0], tmp_path / f"from{step}")
            life = Life(self, where, tmp_path, f"again{step}", "--resume-from", str(step), "--every-step")
            life.until(3)
            life.end(signal.SIGKILL)
            found = self.run(where, tmp_path)
            self.same(found, plain, f"resumed from step {step}, killed three steps later and resumed once more")

    def test_sigterm_leaves_with_its_step_saved(self, plain: dict[str, Any], tmp_path: Path) -> None:
        for part in (2, 4, 8, 16):
            saved = tmp_path / f"saved{part}"
            life = Life(self, saved, tmp_path, "asked")
            life.until(max(self._steps(plain) // part, 1))
            life.end(signal.SIGTERM)
            if life.count < self._steps(plain):
                break  # else it was over before the signal came, which says nothing
        assert life.returncode == 128 + signal.SIGTERM, f"exit status {life.returncode}\n{life.tail()}"
        with tenuto.open(saved) as opened:
            # The line is printed after the step is counted, and a signal leaves while it is being counted.
            assert opened.step in (life.step, life.step + 1), f"step {opened.step} is saved, and {life.step} was done"
        self.same(self.run(saved, tmp_path), plain, f"asked to leave at step {life.step}")

    def test_certify_finds_it_exact(self, tmp_path: Path) -> None:
        if not self.repeats_itself:
            pytest.skip("this trainer's runs differ without any interruption")
        if not self.certify_steps:
            pytest.skip("certify_steps names none")
        for number, steps in enumerate(self.certify_steps):
            where = tmp_path / f"certified{number}"
            script = self._command(where, tmp_path / "certified.json")
            command = [sys.executable, "-m", "tenuto", "certify", str(where), "--steps", str(steps), "--more", "3"]
            done = subprocess.run(
                [*command, "--", *script],
                env=self._environ(),
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=4 * self.deadline_s,
                check=False,
            )
            assert done.stdout.startswith("EXACT"), f"--steps {steps}:\n{done.stdout[-TAIL:]}{done.stderr[-TAIL:]}"

    # -- what they are made of

    def run(self, where: Path | str, directory: Path, *more: str) -> dict[str, Any]:
        """Runs the script to its end; returns what it came to."""
        life = Life(self, where, directory, "whole", *more)
        life.until(None)
        life.end()
        return life.result()

    def sweep(self, saved: Path, steps: Sequence[int], directory: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        """Resumes from each step, in a copy of the repository; yields what each training came to."""
        if not self.preload:
            for step in steps:
                copied = shutil.copytree(saved, directory / f"from{step}")
                life = Life(self, copied, directory, f"from{step}", "--resume-from", str(step))
                life.until(None)
                life.end()
                yield step, life.result() if life.returncode == 0 else _failed(life.tail())
                shutil.rmtree(copied)
            return
        jobs = []
        for step in steps:
            copied = shutil.copytree(saved, directory / f"from{step}")
            jobs.append([*self._arguments(copied, directory / f"from{step}.json"), "--resume-from", str(step)])
        for step, errors in zip(steps, self.forked(jobs, directory), strict=True):
            out = directory / f"from{step}.json"
            yield step, json.loads(out.read_text()) if not errors else _failed(errors)

    def forked(self, jobs: Sequence[Sequence[str]], directory: Path) -> list[str]:
        """Runs the script once for each list of arguments, in processes forked from one that has imported `preload`.
        Returns what each that failed wrote to stderr; "" for one that did not."""
        done = subprocess.run(
            [*self.command, "-m", "tenuto.testing.forked_scripts", ",".join(self.preload)],
            input=json.dumps([[str(self.script), *arguments] for arguments in jobs]),
            env=self._environ(),
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=self.deadline_s * len(jobs),
            check=False,
        )
        assert done.returncode == 0, done.stderr[-TAIL:]
        found = json.loads((directory / "forked.json").read_text())
        return [errors[-TAIL:] if status else "" for status, errors in found]

    def same(self, found: dict[str, Any], plain: dict[str, Any], what: str) -> None:
        differences = self.differences(found, plain)
        shown = "\n".join(differences[:SHOWN])
        assert not differences, f"{what}: {len(differences)} differences from the training without Tenuto\n{shown}"

    def differences(self, found: dict[str, Any], plain: dict[str, Any]) -> list[str]:
        """Describes what differs from the training without Tenuto."""
        if "failed" in found:
            return [f"it failed: {found['failed']}"]
        digest, wanted = found["digest"], plain["digest"]
        names = [name for name in {**wanted, **digest} if name not in self.ignored]
        other = [f"{name} differs" for name in names if digest.get(name) != wanted.get(name)]
        return other + _differences(found["history"], plain["history"], "history")

    def start(self, command: Sequence[str], *, errors: int, directory: Path) -> Process:
        """Starts the script in `directory`, in a session of its own. errors: the descriptor of its stderr."""
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=self._environ(),
            cwd=directory,
            start_new_session=True,
        )

    def _steps(self, plain: dict[str, Any]) -> int:
        return int(plain["steps"])

    def _arguments(self, where: Path | str, out: Path) -> list[str]:
        return ["--where", str(where), "--out", str(out), *self.options]

    def _command(self, where: Path | str, out: Path) -> list[str]:
        return [*self.command, str(self.script), *self._arguments(where, out)]

    def _environ(self) -> dict[str, str]:
        return {**os.environ, "PYTHONUNBUFFERED": "1", **self.environment}


class Life:
    """One process of the script."""

    def __init__(self, suite: TrainerSuite, where: Path | str, directory: Path, name: str, *more: str) -> None:
        self._errors = directory / f"{name}.err"
        self._out = directory / f"{name}.json"
        self._out.unlink(missing_ok=True)
        self._until_s = time.monotonic() + suite.deadline_s
        with self._errors.open("wb") as errors:
            command = [*suite._command(where, self._out), *more]
            self._process = suite.start(command, errors=errors.fileno(), directory=directory)
        self.step = 0
        """The last step that was told."""
        self.count = 0
        """Steps that were told."""
        self._pending = b""
        self._first_s = self._last_s = 0.0

    @property
    def returncode(self) -> int:
        return int(self._process.wait())

    def until(self, count: int | None) -> None:
        """Waits until so many steps are done in this process, or it has ended."""
        while count is None or self.count < count:
            if not self._read(None):
                return

    def wait_within_step(self, part: float) -> None:
        """Lets this part of a usual step's time pass, so that the kill that follows may fall anywhere in one."""
        each_s = (self._last_s - self._first_s) / max(self.count - 1, 1)
        until = time.monotonic() + part * max(each_s, 0.01)
        while (left := until - time.monotonic()) > 0 and self._read(left):
            pass

    def end(self, number: signal.Signals | None = None) -> None:
        """Sends a signal, if there is one, and waits for the end of the process and what it printed."""
        if number is not None and self._process.poll() is None:
            self._process.send_signal(number)
            if number == signal.SIGKILL:
                self._kill_group()
        while self._read(None):
            pass
        self._process.wait(timeout=max(self._until_s - time.monotonic(), 1.0))
        self._kill_group()  # workers of a loader, if any are left
        assert self._process.stdout is not None
        self._process.stdout.close()

    def result(self) -> dict[str, Any]:
        assert self.returncode == 0, f"exit status {self.returncode}\n{self.tail()}"
        assert self._out.exists(), f"the script has not written {self._out}\n{self.tail()}"
        found: dict[str, Any] = json.loads(self._out.read_text())
        assert found.keys() >= {"digest", "history"}, f"{self._out.name} has no digest and history, but {sorted(found)}"
        return {"steps": self.count, **found}

    def tail(self) -> str:
        return self._errors.read_text(errors="replace")[-TAIL:]

    def _read(self, timeout: float | None) -> bool:
        """Reads what the script prints next. Returns False at its end, or after `timeout` seconds."""
        stream = self._process.stdout
        assert stream is not None
        left = self._until_s - time.monotonic() if timeout is None else timeout
        if not select.select([stream], [], [], max(left, 0.0))[0]:
            if timeout is None:
                self._kill_group()
                raise AssertionError(
                    f"the script has printed nothing more in time, after step {self.step}\n{self.tail()}"
                )
            return False
        data = os.read(stream.fileno(), 1 << 16)
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            words = line.split()
            if len(words) == 2 and words[0] == b"step" and words[1].isdigit():
                self.step, self.count = int(words[1]), self.count + 1
                self._last_s = time.monotonic()
                self._first_s = self._first_s or self._last_s
        return bool(data)

    def _kill_group(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # nothing of it is left


def _failed(errors: str) -> dict[str, Any]:
    last = " ".join(line.strip() for line in errors.strip().splitlines()[-2:])  # an error, and its hint
    return {"failed": last or "without a word", "digest": {}, "history": None}


def _differences(found: Any, wanted: Any, path: str) -> list[str]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        return [
            one for key in {**wanted, **found} for one in _differences(found.get(key), wanted.get(key), f"{path}/{key}")
        ]
    if isinstance(found, list) and isinstance(wanted, list):
        if len(found) != len(wanted):
            return [f"{path} has {len(found)} entries, not {len(wanted)}"]
        pairs = zip(found, wanted, strict=True)
        return [one for at, (a, b) in enumerate(pairs) for one in _differences(a, b, f"{path}/{at}")]
    same = found == wanted or repr(found) == repr(wanted) == "nan"
    return [] if same else [f"{path} is {found!r}, not {wanted!r}"]
