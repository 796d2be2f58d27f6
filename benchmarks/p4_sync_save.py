"""P4: a durable synchronous save: digested, files and directories synced, committed.

    python benchmarks/p4_sync_save.py --gib 1

Target: at least 90 % of the raw O_DIRECT write of the same bytes to a fresh file, twice torch.save + fsync, 1.5 times
dcp.save.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import raw
from harness import (
    Contender,
    Result,
    Target,
    arguments,
    compare,
    empty_directory,
    make_state,
    note,
    report,
    tensors_of,
    timed,
    workplace,
)

import tenuto


def loop(where: Path, state: dict[str, Any]) -> tuple[tenuto.Checkpointer, Contender]:
    """Inside a training loop: memory is held between saves; the older checkpoint is removed beside the next step."""
    checkpointer = tenuto.Checkpointer(where, state, keep=tenuto.keep.latest(1))

    def measure() -> float:
        checkpointer.step_done()
        seconds = timed(lambda: checkpointer.save(wait=True))
        checkpointer.wait()  # what is unlinked beside training would run into the next contender
        return seconds

    return checkpointer, Contender("tenuto save(wait=True)", measure)


def once(place: Path, state: dict[str, Any]) -> Contender:
    def measure() -> float:
        where = place / "once"
        seconds = timed(lambda: tenuto.save(state, where))
        shutil.rmtree(where)
        return seconds

    return Contender("tenuto.save, one-off", measure)


def file_written(place: Path, name: str, write: Callable[[Path], float]) -> Contender:
    def measure() -> float:
        seconds = write(place / "file")
        (place / "file").unlink()
        return seconds

    return Contender(name, measure)


def directory_written(
    place: Path, name: str, save: Callable[[dict[str, Any], Path], float], state: dict[str, Any]
) -> Contender:
    def measure() -> float:
        seconds = save(state, empty_directory(place / "directory"))
        shutil.rmtree(place / "directory")
        return seconds

    return Contender(name, measure)


def main() -> None:
    options = arguments(__doc__ or "")
    state = make_state(options.gib, options.leaves)
    tensors = tensors_of(state)
    data = raw.aligned(sum(one.nbytes for one in tensors))
    with workplace(options) as place:
        piece = raw.fastest_piece("write", place / "file", data)
        checkpointer, own = loop(place / "ours", state)
        contenders = [
            file_written(place, "raw O_DIRECT write", lambda path: raw.write(path, data, piece)),
            own,
            once(place, state),
            file_written(place, "torch.save + fsync", lambda path: peers.torch_save(state, path)),
            directory_written(place, "dcp.save", peers.dcp_save, state),
            file_written(place, "safetensors + fsync", lambda path: peers.safetensors_save(state["model"], path)),
        ]
        if peers.has_torch_checkpointing():
            save = peers.torch_checkpointing_save
            contenders.append(directory_written(place, "torch_checkpointing + fsync", save, state))
        seconds = compare(contenders, rounds=options.rounds, own=own.name, note=note)
        checkpointer.close()
        result = Result("p4_sync_save", seconds, sum(one.nbytes for one in tensors), sized=True)
        result.facts["raw_piece_mib"] = piece >> 20
        if peers.has_torch_checkpointing():
            result.facts["torch_checkpointing"] = "without its direct I/O, whose buffers are not aligned: EINVAL here"
        result.judge(
            Target("share of the raw direct write's speed >= 0.90", "raw O_DIRECT write", own.name, at_least=0.90)
        )
        result.judge(Target("times faster than torch.save + fsync >= 2", "torch.save + fsync", own.name, at_least=2.0))
        result.judge(Target("times faster than dcp.save >= 1.5", "dcp.save", own.name, at_least=1.5))
        report(result, options, place)


if __name__ == "__main__":
    main()
