"""What P8 measures, each in a process of its own: gets ready, says so, waits for the word, works, waits for the end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
from harness import GIB, make_state, tensors_of, wait_for_seal

import tenuto
from tenuto.engine.staging import slots

MIB = 1 << 20
STEPS = 6
LEAVE = "leave images"
OURS = ("tenuto.Checkpointer", "tenuto.save, one-off", "tenuto.load")
TIER = "tenuto.Checkpointer, memory tier"
FROM_MEMORY = "restore() from memory, tenuto"
SAVES = (OURS[0], OURS[1], TIER, "dcp.async_save, thread", "dcp.async_save, process", "torch.save", "dcp.save")
LOADS = (OURS[2], FROM_MEMORY, "torch.load + copy", "torch.load(mmap) + copy", "dcp.load", "safetensors + copy")
FILES = {
    OURS[2]: "ours",
    FROM_MEMORY: "remembered",
    "torch.load + copy": "state.pt",
    "torch.load(mmap) + copy": "state.pt",
    "dcp.load": "dcp",
    "safetensors + copy": "state.safetensors",
}


def saving(what: str, state: dict[str, Any], where: Path, budget: int | None) -> Callable[[], object]:
    def by_us() -> None:
        with tenuto.Checkpointer(where, state, keep=tenuto.keep.latest(1), memory_budget=budget) as checkpointer:
            for _ in range(2):
                checkpointer.step_done()
                checkpointer.save().wait()

    def with_memory() -> None:
        with remembering(where, state) as checkpointer:
            for number in range(STEPS):
                checkpointer.step_done()
                if number == STEPS // 2:
                    checkpointer.save()  # the next step is taken into memory while this one is written
            checkpointer.wait()
            wait_for_seal(checkpointer)
            kept = checkpointer.stats.kept_in_memory
            assert kept >= STEPS // 2, f"only {kept} states were kept in memory"

    def by_dcp(mode: str) -> Callable[[], object]:
        where.mkdir()
        peers.start_group()
        return lambda: peers.dcp_async_begin(state, where, mode)()

    def by_dcp_now() -> Callable[[], object]:
        where.mkdir()
        return lambda: peers.dcp_save(state, where)

    actions: dict[str, Callable[[], Callable[[], object]]] = {
        OURS[0]: lambda: by_us,
        OURS[1]: lambda: lambda: tenuto.save(state, where),
        TIER: lambda: with_memory,
        "dcp.async_save, thread": lambda: by_dcp("thread"),
        "dcp.async_save, process": lambda: by_dcp("process"),
        "torch.save": lambda: lambda: peers.torch_save(state, where),
        "dcp.save": by_dcp_now,
    }
    return actions[what]()


def remembering(where: Path, state: dict[str, Any]) -> tenuto.Checkpointer:
    """Every step in memory, and none on the disk unless somebody asks."""
    return tenuto.Checkpointer(
        where,
        state,
        save=tenuto.every(steps=1_000_000),
        memory=tenuto.every(steps=1),
        keep=tenuto.keep.latest(1),
    )


def leave(state: dict[str, Any], where: Path) -> None:
    """Leaves two sealed images, as a training that is killed does."""
    checkpointer = remembering(where, state)
    for _ in range(STEPS):
        checkpointer.step_done()
        wait_for_seal(checkpointer)
    os.kill(os.getpid(), signal.SIGKILL)


def loading(what: str, state: dict[str, Any], where: Path) -> Callable[[], object]:
    def from_memory() -> None:
        checkpointer = remembering(where, state)
        restored = checkpointer.restore()
        assert restored is not None and restored.source.startswith("from memory"), restored
        checkpointer.step_done()  # goes on: the images are its own now
        wait_for_seal(checkpointer)

    actions: dict[str, Callable[[], object]] = {
        OURS[2]: lambda: tenuto.load(where, into=state),
        FROM_MEMORY: from_memory,
        "torch.load + copy": lambda: peers.torch_load(state, where),
        "torch.load(mmap) + copy": lambda: peers.torch_load_mmap(state, where),
        "dcp.load": lambda: peers.dcp_load(state, where),
        "safetensors + copy": lambda: peers.safetensors_load(state, where),
    }
    return actions[what]


def work(options: argparse.Namespace) -> None:
    """The child: gets ready, says so, waits for the word, works, says how it went and waits for the end."""
    slots.SHARED_MEMORY = options.shared_memory  # type: ignore[misc]
    warm = make_state(2 * MIB / GIB, 2)
    place = Path(options.at)
    if options.child == LEAVE:
        leave(make_state(options.gib, options.leaves), place)
    if options.child in SAVES:  # code, threads and libraries are the training's own: they are in place before
        saving(options.child, warm, place.with_name(place.name + "-warm"), None)()
        state = make_state(options.gib, options.leaves)
        action = saving(options.child, state, place, options.budget)
    else:
        warmed = place.with_name(place.name + "-warm")
        if options.child == FROM_MEMORY:
            saving(TIER, warm, warmed, None)()
        else:
            loading(options.child, warm, warmed)()
        state = make_state(options.gib, options.leaves)
        for tensor in tensors_of(state):
            tensor.zero_()
        action = loading(options.child, state, place)
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        action()
    except Exception as error:  # noqa: BLE001 - how it ended is a result, whatever it was
        print(f"failed: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
    else:
        print("done", flush=True)
    sys.stdin.readline()
    os._exit(0)
