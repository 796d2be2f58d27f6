"""Sealed images that a run may go on from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.engine.halves import Half
from holdfast.errors import StoreError
from holdfast.repo.adoption import Adoptable, judge
from holdfast.repo.footer import Footer
from holdfast.repo.repository import Repo


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sealed image that the run may go on from."""

    half: Half
    footer: Footer
    adoptable: Adoptable


def adoptable(
    repo: Repo, run: str, sealed: Iterable[tuple[Half, Footer]], report: Callable[[str], None]
) -> list[Candidate]:
    """Those that the run may go on from, newest first. `report` is told why another may not."""
    found: list[Candidate] = []
    for half, footer in sealed:
        try:
            verdict = judge(repo, run, footer)
        except StoreError as error:
            verdict = f"the repository does not answer: {error.message}"
        if isinstance(verdict, str):
            report(f"step {footer.id.step} in memory (attempt {footer.holder.attempt}) is passed over: {verdict}")
        else:
            found.append(Candidate(half, footer, verdict))
    return sorted(found, key=lambda one: newness(one.footer), reverse=True)


def newness(footer: Footer) -> tuple[int, int, int]:
    """What is newer is greater, among the images of one rank."""
    return (footer.holder.attempt, footer.id.step, footer.sequence)
