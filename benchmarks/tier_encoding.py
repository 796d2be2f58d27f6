"""What a tier with an encoding of its own takes: bytes stored, time of a drain, time of a restore from it alone.

    python benchmarks/tier_encoding.py

Successive states of a small language model in training (`trained_states.py`), one step apart, lie plain in a first
tier. Each encoding then drains all of them to a tier of its own, in turn, as training does in the background; a drain
ends when the checkpoint's manifest is there. Restores read the newest from that tier alone, from the page cache.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from harness import Result, arguments, note, report, workplace
from trained_states import State, states

import tenuto
from tenuto import Tier, Tiers
from tenuto.maintenance.encoded_copy import copy_to
from tenuto.policy.encoding import encoding_of
from tenuto.repo.replicated.members import join_follower
from tenuto.repo.repository import Repo

ENCODINGS = ("plain", "dedupe", "auto", "small")
RESTORES = 3


def stored(place: Path) -> int:
    return sum(path.stat().st_size for path in place.rglob("rank-*"))


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=300, help="steps trained before the last state")
    parser.add_argument("--checkpoints", type=int, default=8, help="states drained, one step apart")


def drained(repo: Repo, place: Path, encoding: str) -> list[float]:
    """Brings every checkpoint to the place; returns the seconds of each."""
    tier = next(one for one in repo.store.tiers if one.store.url == str(place))  # type: ignore[attr-defined]
    join_follower(repo.store, tier.store, repo.id)
    copier, seconds = copy_to(repo, tier.store, encoding_of(encoding)), []
    for id in repo.checkpoints():
        began = time.perf_counter()
        copier.bring(id)
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    options = arguments(__doc__ or "", add=options_of)
    found: dict[int, State] = states(options.steps, tuple(range(1, options.checkpoints)))
    result = Result("tier_encoding", {}, 0)
    facts: dict[str, Any] = {}
    with workplace(options) as root:
        places = {name: root / name for name in ENCODINGS}
        tiers = Tiers(Tier(root / "first"), *(Tier(place) for place in places.values()))
        for gap in sorted(found, reverse=True):
            tenuto.save(found[gap], root / "first", step=options.steps - gap)
        repo = Repo.create_or_open(tiers)
        result.bytes = sum(t.numel() * t.element_size() for part in found[0].values() for t in part.values())
        for name, place in places.items():
            result.seconds[f"drain, {name}"] = drained(repo, place, name)
            target = {
                part: {key: torch.empty_like(value) for key, value in of.items()} for part, of in found[0].items()
            }
            restores = result.seconds[f"restore, {name}"] = []
            for _ in range(RESTORES):
                began = time.perf_counter()
                tenuto.load(place, target)
                restores.append(time.perf_counter() - began)
            same = all(torch.equal(target[p][k], v) for p, of in found[0].items() for k, v in of.items())
            assert same, f"{name}: another state came back"
            facts[name] = {"stored": stored(place), "drain_s": sum(result.seconds[f"drain, {name}"])}
            note(f"{name}: {facts[name]}")
        facts["state"] = result.bytes
        facts["checkpoints"] = len(found)
        facts["cores"] = len(os.sched_getaffinity(0))
        options.leaves = sum(len(part) for part in found[0].values())
        result.facts["tiers"] = facts
        report(result, options, root)


if __name__ == "__main__":
    main()
