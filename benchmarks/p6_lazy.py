"""P6: opening a checkpoint of many tensors to look at one of them.

    python benchmarks/p6_lazy.py

Times are taken with the files in the page cache, and again with all of them dropped from it. Bytes are those of the
cold rounds, by this process's own account in /proc/self/io: `asked` is what read calls returned (rchar), `fetched` what
came from the disk for it (read_bytes), which counts page faults of mapped files and the kernel's read-ahead too.
Target: open at most 10 ms, first tensor at most 1 ms, bytes of the first tensor at most its own and two chunks.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed.checkpoint as dcp
from harness import (
    Result,
    arguments,
    drop_cache,
    make_state,
    median_interval,
    note,
    report,
    tensors_of,
    warm_cache,
    workplace,
)
from safetensors import safe_open

import tenuto

CHUNK = 262144
HOT, COLD = 30, 7
LEAVES = 10_000


@dataclass(frozen=True)
class Look:
    """How one contender opens `root` and then reads the tensor `name`."""

    name: str
    root: Path
    open: Callable[[Path], Any]
    read: Callable[[Any, str], Any]


def of_dcp(root: Path, name: str, like: torch.Tensor) -> torch.Tensor:
    """dcp has no open: it is given the one tensor to fill."""
    wanted = {"model": {name: torch.empty_like(like)}}
    dcp.load(wanted, checkpoint_id=str(root), no_dist=True)
    return wanted["model"][name]


def looks(place: Path, like: torch.Tensor) -> list[Look]:
    return [
        Look("tenuto", place / "ours", tenuto.open, lambda opened, name: opened[f"model/{name}"][...]),
        Look(
            "torch.load(mmap)",
            place / "state.pt",
            lambda root: torch.load(root, weights_only=True, mmap=True),
            lambda opened, name: opened["model"][name].clone(),
        ),
        Look(
            "safetensors",
            place / "state.safetensors",
            lambda root: safe_open(root, framework="pt"),
            lambda opened, name: opened.get_tensor(name).clone(),  # its bytes are read when they are touched
        ),
        Look("dcp", place / "dcp", lambda root: root, lambda root, name: of_dcp(root, name, like)),
    ]


def account() -> tuple[int, int]:
    """Bytes that read calls of this process returned, and bytes that the disk was asked for."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(found["rchar"]), int(found["read_bytes"])


def look(one: Look, name: str, expected: torch.Tensor, heat: str, result: Result) -> None:
    """One opening and one tensor, each timed and accounted for."""
    if heat == "cold":
        drop_cache(one.root)
    else:
        warm_cache(one.root)
    before, begun = account(), time.perf_counter()
    opened = one.open(one.root)
    open_s = time.perf_counter() - begun
    between, begun = account(), time.perf_counter()
    found = one.read(opened, name)
    first_s = time.perf_counter() - begun
    after = account()
    assert torch.equal(torch.as_tensor(found), expected), f"{one.name} read something else"
    result.seconds.setdefault(f"{one.name}: open, {heat}", []).append(open_s)
    result.seconds.setdefault(f"{one.name}: first tensor, {heat}", []).append(first_s)
    if heat == "cold":
        own = between[0] - before[0]  # reading /proc/self/io is part of the account: a few hundred bytes
        result.memory.setdefault(f"{one.name}: open, asked", []).append(own)
        result.memory.setdefault(f"{one.name}: open, fetched", []).append(between[1] - before[1])
        result.memory.setdefault(f"{one.name}: first tensor, asked", []).append(after[0] - between[0])
        result.memory.setdefault(f"{one.name}: first tensor, fetched", []).append(after[1] - between[1])
    close = getattr(opened, "close", None)
    if close is not None:
        close()


def main() -> None:
    options = arguments(__doc__ or "", leaves=LEAVES)
    state = make_state(options.gib, options.leaves)
    names = list(state["model"])
    with workplace(options) as place:
        tenuto.save(state, place / "ours")
        peers.torch_save(state, place / "state.pt")
        peers.safetensors_save(state["model"], place / "state.safetensors")
        (place / "dcp").mkdir()
        peers.dcp_save(state, place / "dcp")
        nbytes = sum(one.nbytes for one in tensors_of(state))
        contenders = looks(place, state["model"][names[0]])
        result = Result("p6_lazy", {}, nbytes)
        gc.disable()
        for heat, rounds in (("hot", options.rounds or HOT), ("cold", min(options.rounds or COLD, COLD))):
            warm = Result("warming", {}, nbytes)
            for turn in range(-1, rounds):
                name = names[(turn * 7919 + 4001) % len(names)]
                for place_in_turn in range(len(contenders)):
                    one = contenders[(place_in_turn + turn) % len(contenders)]
                    look(one, name, state["model"][name], heat, warm if turn < 0 else result)
                gc.collect()
            note(f"{heat}: {rounds} rounds")
        gc.enable()
        result.facts["tensor_bytes"] = nbytes // len(names)
        judge(result, nbytes // len(names))
        report(result, options, place)


def judge(result: Result, needed: int) -> None:
    for heat in ("hot", "cold"):
        for what, limit in (("open", 10.0), ("first tensor", 1.0)):
            found = median_interval([value * 1e3 for value in result.seconds[f"tenuto: {what}, {heat}"]])
            result.judge_value(f"{what} <= {limit:g} ms, {heat}", found, at_most=limit, unit="ms")
    allowed = (needed + 2 * CHUNK) / (1 << 20)
    for account_ in ("asked", "fetched"):
        found = median_interval([value / (1 << 20) for value in result.memory[f"tenuto: first tensor, {account_}"]])
        text = f"first tensor, bytes {account_} <= its {needed:,} + 2 chunks"
        result.judge_value(text, found, at_most=allowed, unit="mib")


if __name__ == "__main__":
    main()
