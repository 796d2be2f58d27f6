"""`python -m campaigns.rank_kills --kills 200 --seed 1 --json result.json`

Numbers that depend on the step alone (`--training nodes`: their packs on each node's own disk), and trainings under
torch (DDP, FSDP2), in turn. The ranks are forked from this process, which has imported torch and runs none of it. Exit
status 12 if a training differs from the untouched one, if a rank that was left alone did not find out, or if a control
was not told.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from campaigns.rank_kills.campaign import Tallies, campaign, summary
from campaigns.rank_kills.kinds import Kind, OfNumbers, OnNodes
from campaigns.result_file import Progress, ResultHeader, deliver, options

MODULE: Final = "campaigns.rank_kills"
WITH_TORCH: Final = ("ddp", "fsdp2")
TRAININGS: Final = {"mix": ("numbers", *WITH_TORCH), "torch": WITH_TORCH}
"""What stands for several kinds."""
PLAIN: Final[dict[tuple[str, ...], type[OfNumbers]]] = {("numbers",): OfNumbers, ("nodes",): OnNodes}
"""What needs no torch."""


def kinds(names: tuple[str, ...], place: Path, *, steps: int, torch_steps: int) -> list[Kind]:
    """`place`: where untouched trainings are. torch is imported where it is needed, before the first rank is forked."""
    if names in PLAIN:
        return [PLAIN[names](steps)]
    from campaigns.rank_kills.torch_training import CONTROLS, OfTorch
    from campaigns.resume_ranks.cases import WRAPPERS
    from tenuto.demo.runner import load_framework

    load_framework()
    chosen = [wrapper for wrapper in WRAPPERS if wrapper in names]
    under_torch: list[Kind] = [
        OfTorch(wrapper, torch_steps, place, CONTROLS[number :: len(chosen)]) for number, wrapper in enumerate(chosen)
    ]
    return [OfNumbers(steps), *under_torch] if "numbers" in names else under_torch


def main(arguments: list[str] | None = None) -> int:
    parser = options(MODULE, "Kills single ranks of a job; every round must end bit for bit as the untouched one.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--training", choices=[*TRAININGS, "numbers", "nodes", *WITH_TORCH], default="mix")
    parser.add_argument("--steps", type=int, default=40, help="of a training of numbers")
    parser.add_argument("--torch-steps", type=int, default=24, help="of a training under torch")
    parser.add_argument("--no-controls", action="store_true", help="break nothing that has to be told")
    given = parser.parse_args(arguments)
    names = TRAININGS.get(given.training, (given.training,))
    packages = ["numpy"] if names in PLAIN else ["numpy", "torch"]
    result_header, progress = ResultHeader(MODULE, arguments, seed=given.seed, packages=packages), Progress()
    tallies: Tallies = {}
    with tempfile.TemporaryDirectory(prefix="tenuto-ranks-") as place:
        chosen = kinds(names, Path(place) / "untouched", steps=given.steps, torch_steps=given.torch_steps)
        rounds = campaign(given.kills, given.seed, Path(place), chosen, controls=not given.no_controls)
        for tallies in rounds:
            found = summary(tallies)
            equal = f"{found['rounds_equal_to_the_untouched_training']} of {found['rounds']} rounds equal"
            progress(f"{found['kills']} of {given.kills} kills, {equal}")
    progress.end()
    deliver(result_header.result(summary(tallies)), given.json)
    return 0 if all(tally.as_it_has_to_be for tally in tallies.values()) else 12


if __name__ == "__main__":
    sys.exit(main())
