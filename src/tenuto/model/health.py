"""The health of a checkpoint: what its save has found of the values of its leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tenuto.errors import CorruptionError
from tenuto.model.canonical_json import tag_number, untag_number
from tenuto.record import record
from tenuto.units import count

SHOWN: Final = 8
"""The most leaves that are recorded by name."""
NAMED: Final = 3
"""The most of them in a message."""


@record
class Health:
    """The health of the values of one checkpoint.

    leaves: how many have NaN or infinite values that they had not when training began; where there is any, the
        checkpoint is unhealthy. paths: of the first eight of them.
    nonfinite: how many values are NaN or infinite, those of masks and the like among them.
    norm: the root of the sum of squares of all floating-point values that are finite.
    changed: the fraction of bytes, in whole chunks, that differs from the save before; None where that is not known.
    """

    leaves: int = 0
    paths: tuple[str, ...] = ()
    nonfinite: int = 0
    norm: float = 0.0
    changed: float | None = None

    @property
    def healthy(self) -> bool:
        return not self.leaves

    def __str__(self) -> str:
        """Returns what is wrong: "4 leaves with NaN or infinities (w, b, c and 1 more)"; empty if healthy."""
        if not self.leaves:
            return ""
        more = self.leaves - len(self.paths[:NAMED])
        names = ", ".join(self.paths[:NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"{count(self.leaves, 'leaf')} with NaN or infinities ({names})"

    def to_json(self) -> dict[str, Any]:
        return {
            "changed": None if self.changed is None else round(self.changed, 6),
            "leaves": self.leaves,
            "nonfinite": self.nonfinite,
            "norm": tag_number(self.norm),
            "paths": list(self.paths),
        }

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Health:
        """Reads what `to_json` gives. Raises ValueError for anything else."""
        leaves, nonfinite, paths = record.get("leaves"), record.get("nonfinite"), record.get("paths")
        changed = record.get("changed")
        try:
            norm = float(untag_number(record.get("norm")))
        except (CorruptionError, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None
        if not (type(leaves) is int and type(nonfinite) is int and min(leaves, nonfinite) >= 0):
            raise ValueError("leaves and nonfinite are not whole numbers")
        if not isinstance(paths, list) or len(paths) > SHOWN or not all(isinstance(path, str) for path in paths):
            raise ValueError(f"paths is not a list of at most {SHOWN} texts")
        if changed is not None and (type(changed) not in (int, float) or not 0 <= changed <= 1):
            raise ValueError("changed is not a fraction")
        return cls(leaves, tuple(paths), nonfinite, norm, None if changed is None else float(changed))


def united(parts: Iterable[tuple[Health, int]]) -> Health:
    """Returns the health of a checkpoint from those of what its ranks wrote, each with its bytes."""
    found = list(parts)
    known = [(part.changed, nbytes) for part, nbytes in found if part.changed is not None]
    total = sum(nbytes for _, nbytes in known)
    paths = list(dict.fromkeys(path for part, _ in found for path in part.paths))
    twice = sum(len(part.paths) for part, _ in found) - len(paths)
    return Health(
        leaves=sum(part.leaves for part, _ in found) - twice,
        paths=tuple(paths[:SHOWN]),
        nonfinite=sum(part.nonfinite for part, _ in found),
        norm=math.hypot(*(part.norm for part, _ in found)),
        changed=sum(one * nbytes for one, nbytes in known) / total if total and len(known) == len(found) else None,
    )
