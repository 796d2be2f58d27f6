"""How the bytes of a checkpoint are stored: as they are, what is there already named instead of written, compressed, or
as the difference to what the run has saved before. Decisions and words only; nothing here touches data."""

from __future__ import annotations

from typing import Final, Literal

from tenuto.errors import UsageError
from tenuto.record import record

FAMILIES: Final = ("zstd", "lz4")
MAX_DELTAS: Final = 32


@record
class Encoding:
    """How saves store their chunks.

    - `dedupe`: a chunk that the run's previous checkpoint has, or the one that it was resumed or forked from, is named
      there and not written again.
    - `codec`: `"zstd"` or `"lz4"` compress what is written, each byte plane of numbers by itself; None
      leaves it as it is.
    - `level`: of the codec; higher is smaller and slower.
    - `delta`: up to so many saves one after the other may store a chunk as the difference to the save before; 0 stores
      none so. Takes memory of the size of the state for the save before, beside the data files that are being filled.
    - `workers`: threads that encode.
    - `auto`: compresses only where that makes saves faster on the place that they go to, which the first saves measure.

    Raises UsageError for values that are none of these.
    """

    dedupe: bool = True
    codec: str | None = "zstd"
    level: int = 1
    delta: int = 0
    workers: int = 2
    auto: bool = False

    def __post_init__(self) -> None:
        if self.codec is not None and self.codec not in FAMILIES:
            raise _refused("codec", self.codec, "codec='zstd', 'lz4' or None")
        if type(self.level) is not int or not -7 <= self.level <= 22:
            raise _refused("level", self.level, "a level from -7 to 22; 1 is a good one for checkpoints")
        if type(self.delta) is not int or not 0 <= self.delta <= MAX_DELTAS:
            raise _refused("delta", self.delta, f"a number from 0 to {MAX_DELTAS}, such as delta=8")
        if type(self.workers) is not int or not 1 <= self.workers <= 256:
            raise _refused("workers", self.workers, "workers=2")
        if self.delta and (self.codec is None or not self.dedupe):
            raise _refused("delta", self.delta, "a codec and dedupe=True as well: differences rest on earlier saves")

    @property
    def plain(self) -> bool:
        """Returns whether every chunk is written as it is."""
        return not self.dedupe and self.codec is None


Preset = Literal["plain", "dedupe", "auto", "small"]
PLAIN: Final = Encoding(dedupe=False, codec=None)
PRESETS: Final = {
    "plain": PLAIN,
    "dedupe": Encoding(codec=None),
    "auto": Encoding(auto=True),
    "small": Encoding(level=3, delta=8),
}


def encoding_of(value: object) -> Encoding:
    """Returns the encoding that a caller or a settings file means. Raises UsageError."""
    if value is None:
        return PLAIN
    if isinstance(value, Encoding):
        return value
    found = PRESETS.get(value) if isinstance(value, str) else None
    if found is None:
        known = ", ".join(repr(name) for name in PRESETS)
        raise UsageError(
            f"encoding={value!r} is not an encoding", subject="encoding", hint=f"{known}, or tenuto.Encoding(…)"
        )
    return found


def _refused(name: str, value: object, hint: str) -> UsageError:
    return UsageError(f"Encoding({name}={value!r}) is not possible", subject=name, hint=hint)
