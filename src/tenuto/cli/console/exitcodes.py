"""The exit statuses of `tenuto`: public, and never given another meaning."""

from __future__ import annotations

from typing import Final

EXIT_CODES: Final[dict[int, str]] = {
    0: "done; for verify: everything read is whole",
    1: "something else went wrong",
    2: "the command line makes no sense, or needs --yes",
    3: "an optional package or this platform lacks what is needed",
    4: "the state cannot be represented in what was asked for",
    10: "no Tenuto repository is there, or it cannot be used",
    11: "no such run or checkpoint",
    12: "damage: something is not what was saved, or nothing is restorable",
    13: "another process owns the run",
    14: "written by a newer version of Tenuto",
    15: "a save failed",
    16: "not removed: something still needs it",
    17: "a wait came to its deadline",
    18: "the store failed (input/output, permission)",
    19: "the store is full",
    20: "certify: the resume is not exact",
    21: "certify: the training does not repeat itself",
    22: "the training script failed, or cannot be certified",
    23: "the processes of the job did not come to one answer",
    130: "interrupted",
}


def table() -> str:
    r"""Formats the statuses as an epilog; the \b mark keeps click from joining the lines."""
    lines = [f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()]
    return "\b\nExit status:\n" + "\n".join(lines)


def examples(*lines: str) -> str:
    """Formats examples as an epilog."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
