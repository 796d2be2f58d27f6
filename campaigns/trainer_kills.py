"""Kills trainings of each trainer's adapter at random moments, and compares their ends with one that nobody killed.

    make test-trainers                                   # installs what they need, below build/trainers
    python -m campaigns.trainer_kills --kills 50

A round is a training that is killed up to five times, somewhere within a step, and then ends by itself. The scripts
are those of `tests/trainers`, each in its own environment. Versions of the trainers: `tests/trainers/install.py`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from campaigns.result_file import Progress, ResultHeader, deliver, options
from tenuto.testing.trainer_suite import Life, TrainerSuite

MODULE: Final = "campaigns.trainer_kills"
ROOT: Final = Path(__file__).parents[1]
SCRIPTS: Final = ROOT / "tests" / "trainers"
ENVIRONMENTS: Final = ROOT / "build" / "trainers"
KILLS_OF_A_ROUND: Final = 5


@dataclass(frozen=True)
class Case:
    """A training with one trainer. `environment`: the directory below build/trainers whose Python runs the script."""

    trainer: str
    environment: str
    script: str
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


_CPU: Final = (("JAX_PLATFORMS", "cpu"), ("XLA_FLAGS", ""))
CASES: Final = (
    Case("Lightning", "torch", "torch/scripts/lightning_train.py", ("--case", "mnist")),
    Case("Hugging Face", "torch", "torch/scripts/hf_trainer.py", ("--kind", "best")),
    Case("Hugging Face, LoRA", "torch", "torch/scripts/hf_trainer.py", ("--kind", "lora")),
    Case("Accelerate, attached", "torch", "torch/scripts/accelerate_loop.py", ("--case", "plain", "--form", "attach")),
    Case("Accelerate, own loop", "torch", "torch/scripts/accelerate_loop.py", ("--case", "plain", "--form", "own")),
    Case("Keras on torch", "torch", "scripts/keras_fit.py", (), (("KERAS_BACKEND", "torch"),)),
    Case("Keras on JAX", "jax", "scripts/keras_fit.py", (), (("KERAS_BACKEND", "jax"),)),
    Case("Optax", "jax", "jax/train_jax.py", ("--kind", "optax"), _CPU),
    Case("Flax NNX", "jax", "jax/train_jax.py", ("--kind", "nnx"), _CPU),
    Case("Keras on TensorFlow", "tensorflow", "scripts/keras_fit.py", (), (("KERAS_BACKEND", "tensorflow"),)),
)


def suite_of(case: Case) -> TrainerSuite:
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "tests")))
    members = {
        "script": SCRIPTS / case.script,
        "options": case.options,
        "command": (str(ENVIRONMENTS / case.environment / "bin" / "python"),),
        "environment": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **dict(case.variables)},
        "deadline_s": 900.0,
    }
    suite = type("OneCase", (TrainerSuite,), members)()
    assert isinstance(suite, TrainerSuite)
    return suite


def attack(case: Case, *, kills: int, seed: int, told: Progress) -> dict[str, Any]:
    """Returns what became of the rounds of one case."""
    suite, dice = suite_of(case), random.Random(f"{seed} {case.trainer}")
    found: dict[str, Any] = {"trainer": case.trainer, "kills": 0, "rounds": 0, "equal": 0}
    found["differences"] = []
    with tempfile.TemporaryDirectory(prefix="tenuto-trainer-kills-") as directory:
        place = Path(directory)
        plain = suite.run("", place)
        while found["kills"] < kills:
            killed = sum(_killed(suite, place, int(plain["steps"]), dice, found))
            ended = suite.run(place / "saved", place)
            shutil.rmtree(place / "saved")
            differences = suite.differences(ended, plain)
            found["rounds"] += 1
            found["equal"] += not differences
            if differences:
                found["differences"].append({"round": found["rounds"], "kills": killed, "what": differences[:8]})
            told(f"{case.trainer}: {found['kills']} kills, {found['equal']} of {found['rounds']} rounds equal")
    return found


def _killed(suite: TrainerSuite, place: Path, steps: int, dice: random.Random, found: dict[str, Any]) -> Iterator[int]:
    """Yields 1 for each kill; ends early where the training came to its end first."""
    for number in range(KILLS_OF_A_ROUND):
        life = Life(suite, place / "saved", place, f"killed{number}")
        life.until(dice.randint(1, max(steps // 3, 1)))
        life.wait_within_step(dice.random())
        life.end(signal.SIGKILL)
        if life.returncode != -signal.SIGKILL:
            assert life.returncode == 0, life.tail()
            return
        found["kills"] += 1
        yield 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(MODULE, __doc__, workers=2)
    parser.add_argument("--kills", type=int, default=50, help="of each trainer (default %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], metavar="TRAINER", help="how its name begins")
    given = parser.parse_args(arguments)
    cases = [case for case in CASES if not given.only or case.trainer.startswith(tuple(given.only))]
    if missing := {case.environment for case in cases if not (ENVIRONMENTS / f"{case.environment}.done").exists()}:
        parser.error(f"not installed: {' '.join(sorted(missing))}; python tests/trainers/install.py")
    header, told = ResultHeader(MODULE, arguments, seed=given.seed), Progress()
    with ThreadPoolExecutor(given.workers) as pool:
        found = list(pool.map(partial(attack, kills=given.kills, seed=given.seed, told=told), cases))
    told.end()
    counts = {name: sum(one[name] for one in found) for name in ("kills", "rounds", "equal")}
    deliver(header.result({**counts, "by_trainer": found}), given.json)
    return 0 if counts["equal"] == counts["rounds"] else 1


if __name__ == "__main__":
    sys.exit(main())
