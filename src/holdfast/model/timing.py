"""Where the time of one save goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

Part = Literal[
    "look_s",
    "wait_s",
    "prepare_s",
    "capture_s",
    "join_s",
    "late_s",
    "queue_s",
    "begin_s",
    "seal_s",
    "digest_s",
    "write_s",
    "index_s",
    "commit_s",
    "cpu_s",
]


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one save went, in seconds. What has not come yet, or does not occur, is 0.

    The training thread is held by the first group. The second runs beside training, unless the save is waited for.
    `late_s`, `digest_s` and `cpu_s` lie across the others.
    """

    look_s: float = 0.0
    """Finding what the state holds, and what there is to say about it."""
    wait_s: float = 0.0
    """Waiting until another save may be in flight."""
    prepare_s: float = 0.0
    """The check who owns the run, and the plan and the memory of the image."""
    capture_s: float = 0.0
    """Copying. Of a save that is waited for, or that does not fit into memory as a whole: the digests as well, and
    waiting for room."""
    fence_s: float = 0.0
    """An update that waited for what a fenced save had not copied yet."""
    join_s: float = 0.0
    """Waiting for the commit, where that was asked for."""
    late_s: float = 0.0
    """Of a fenced save: the copy beside training, from its begin until the image was whole, its pauses included. It may
    begin before the writing does, and is not part of `seconds`."""
    queue_s: float = 0.0
    """Until the saves before were written, where several are in flight. It is not part of `seconds`."""
    begin_s: float = 0.0
    """The question for space, and `begin.json` until it is durable."""
    seal_s: float = 0.0
    """Sealing the image in memory, where states are kept there. Digests and waiting for the capture are not in it."""
    write_s: float = 0.0
    """The packs, written and flushed until they are durable. Digests and waiting for the capture are not in it."""
    index_s: float = 0.0
    """The index, until it is durable."""
    commit_s: float = 0.0
    """The manifest, until it is durable."""
    digest_s: float = 0.0
    """Digests of the image, wherever they were made."""
    cpu_s: float = 0.0
    """Processor time of the thread that writes, and of the one that copies beside training. What a store does in
    threads of its own is not in it."""
    seconds: float = 0.0
    """From the begin of writing to the durable manifest."""
    bytes: int = 0
    """Of the packs."""

    @property
    def held_s(self) -> float:
        """How long the training thread was held."""
        return self.look_s + self.wait_s + self.prepare_s + self.capture_s + self.fence_s + self.join_s

    @property
    def bandwidth(self) -> float | None:
        """Bytes of the packs per second of `write_s`."""
        return self.bytes / self.write_s if self.write_s > 0 and self.bytes else None

    def told(self) -> dict[str, float]:
        """As a manifest says it: seconds, to the microsecond; what is 0 is left out, and so is what the manifest says
        elsewhere."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "bytes"}
        return {name: round(value, 6) for name, value in found.items() if value >= 5e-7}

    @classmethod
    def read(cls, told: Any, nbytes: int) -> Timing | None:
        """Of what a manifest says; None where it says nothing of the kind. What is no duration is passed over."""
        if not isinstance(told, Mapping):
            return None
        names = {field.name for field in fields(cls)} - {"bytes"}
        return cls(**{name: float(told[name]) for name in names if _is_duration(told.get(name))}, bytes=nbytes)


def _is_duration(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value < 1e9
