"""One-off saves of a run that somebody else commits to at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.api import oneoff
from holdfast.repo import attempts, onward
from holdfast.repo.lineage import walk
from holdfast.repo.repository import Repo
from holdfast.store.backends.local import LocalStore

STATE = {"w": np.arange(4.0)}


@pytest.mark.parametrize("when", ["before the claim is put", "after it"])
def test_a_save_goes_on_from_what_the_owner_it_waited_for_has_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    place, hidden = tmp_path / "place", tmp_path / "hidden"
    saved = [holdfast.save(STATE, place) for _ in range(2)]
    oneoff._attempts.clear()  # as another process would have it
    manifest = place / saved[1].id.manifest
    manifest.rename(hidden)
    claimed: list[int] = []

    def meanwhile(*arguments: Any, look: Any, **options: Any) -> Any:
        def committing() -> None:
            if when == "after it":
                look()
            if hidden.exists():
                hidden.rename(manifest)
            if when != "after it":
                look()

        attempt = attempts.claim(*arguments, look=committing, **options)
        claimed.append(attempt.number)
        return attempt

    monkeypatch.setattr(onward, "claim", meanwhile)
    third = holdfast.save(STATE, place)
    repo = Repo.open(LocalStore(place))
    assert third.id.step == saved[1].id.step + 1
    assert list(walk(repo, "main")) == [third.id, saved[1].id, saved[0].id]
    assert repo.manifest(third.id).parent == saved[1].id
    assert claimed == ([2] if when == "before the claim is put" else [2, 3])
