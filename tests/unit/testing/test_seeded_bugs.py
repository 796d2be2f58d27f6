"""Every bug that a campaign seeds can still be put in: code that it patches may have moved since the campaign ran."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest

from campaigns import seeded_bugs
from campaigns.corruption import bugs as corruption
from campaigns.faulty_disk import bugs as faulty_disk
from campaigns.layouts import bugs as layouts
from campaigns.rank_crashes import bugs as rank_crashes
from campaigns.retention_histories import bugs as retention
from campaigns.stateful import campaign as stateful

ALL = [
    (module.__name__, bug)
    for module in (corruption, faulty_disk, layouts, rank_crashes, retention, seeded_bugs, stateful)
    for bug in getattr(module, "BUGS", ())
]


@pytest.mark.parametrize(("campaign", "bug"), ALL, ids=lambda one: getattr(one, "name", None) or "")
def test_a_seeded_bug_can_be_put_in_and_called_like_what_it_replaces(
    campaign: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be called that way would be caught by its own TypeError."""
    plain, replaced = mock.patch.object, []

    def noting(target: Any, name: str, new: Any = mock.DEFAULT, *rest: Any, **more: Any) -> Any:
        replaced.append((getattr(target, name), new))
        return plain(target, name, new, *rest, **more)

    monkeypatch.setattr(mock.patch, "object", noting)
    with bug.patch():
        pass
    for original, new in replaced:
        if inspect.isfunction(original) and inspect.isfunction(new):
            parameters = inspect.signature(original).parameters.values()
            named = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
            positional = [None for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
            inspect.signature(new).bind(*positional, **named)


def test_every_campaign_is_looked_at() -> None:
    assert len({name for name, _ in ALL}) == 7 and len(ALL) > 90
