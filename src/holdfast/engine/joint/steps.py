"""What each rank does, as steps between which other ranks can do theirs.

A rank that waits for others yields first. In a job each rank simply goes on, and waits; a simulation of thousands of
ranks takes their steps in turn, in one thread.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


def through(steps: Steps[Result]) -> Result:
    """All of them, one after the other: what comes of them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Result = end.value
            return found
