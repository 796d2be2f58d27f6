"""What other formats do with a flipped bit of a tensor: the same fault, one at a time, in files that they wrote."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tenuto.api.save_load import load, save

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """`write` puts the state below a directory, `read` gives it back."""

    name: str
    write: Callable[[State, Path], None]
    read: Callable[[Path, State], State]


def _dcp_read(place: Path, like: State) -> State:
    state = {name: torch.zeros_like(value) for name, value in like.items()}
    dcp_load(state, checkpoint_id=str(place / "dcp"))
    return state


PEERS = (
    Peer(
        "torch.load",
        lambda state, place: torch.save(state, place / "state.pt"),
        lambda place, like: dict(torch.load(place / "state.pt", weights_only=True)),
    ),
    Peer(
        "torch.load(mmap=True)",
        lambda state, place: torch.save(state, place / "state.pt"),
        lambda place, like: dict(torch.load(place / "state.pt", weights_only=True, mmap=True)),
    ),
    Peer(
        "torch.distributed.checkpoint.load",
        lambda state, place: void(dcp_save(state, checkpoint_id=str(place / "dcp"))),
        _dcp_read,
    ),
    Peer(
        "safetensors.torch.load_file",
        lambda state, place: save_file(state, place / "state.safetensors"),
        lambda place, like: load_file(place / "state.safetensors"),
    ),
    Peer(
        "tenuto.load",
        lambda state, place: void(save(state, place / "tenuto", step=1)),
        lambda place, like: dict(load(place / "tenuto").state),
    ),
)


def flipped_bits(peer: Peer, flips: int, seed: int) -> dict[str, int]:
    """How a reader answers to `flips` single flipped bits: "other values", "refused" or "right values"."""
    source = random.Random(f"{peer.name} {seed}")
    numbers = np.random.default_rng(seed)
    state = {f"layer.{row}": torch.from_numpy(numbers.random((64, 64), np.float32)) for row in range(4)}
    answers: Counter[str] = Counter({"other values": 0, "refused": 0, "right values": 0})
    with tempfile.TemporaryDirectory(prefix="tenuto-peers-") as directory:
        place = Path(directory)
        peer.write(state, place)
        assert _equal(peer.read(place, state), state), f"{peer.name} does not read what it wrote"
        for _ in range(flips):
            path, at = _somewhere(place, state, source)
            was = path.read_bytes()
            changed = bytearray(was)
            changed[at] ^= 1 << source.randrange(8)
            path.write_bytes(bytes(changed))
            answers[_answer(peer, place, state)] += 1
            path.write_bytes(was)
    return dict(answers)


def _answer(peer: Peer, place: Path, state: State) -> str:
    try:
        found = peer.read(place, state)
    except Exception:  # noqa: BLE001 - however a peer refuses, it has refused
        return "refused"
    return "right values" if _equal(found, state) else "other values"


def _somewhere(place: Path, state: State, source: random.Random) -> tuple[Path, int]:
    """A file and the position of one byte of one tensor in it, found by the tensor's own bytes."""
    wanted = source.choice(list(state.values())).numpy().tobytes()
    for path in sorted(place.rglob("*")):
        if path.is_file():
            start = path.read_bytes().find(wanted)
            if start >= 0:
                return path, start + source.randrange(len(wanted))
    raise AssertionError("no file holds the tensor's bytes as they are")


def _equal(found: State, state: State) -> bool:
    """Bit for bit: a flipped sign of zero counts."""
    return found.keys() == state.keys() and all(
        found[name].numpy().tobytes() == value.numpy().tobytes() for name, value in state.items()
    )


def void(value: Any) -> None:
    """Takes a result that nobody asks for."""
