"""Every bug that a campaign seeds can still be put in: code that it patches may have moved since the campaign ran."""

from __future__ import annotations

from typing import Any

import pytest

from campaigns import seeded_bugs
from campaigns.corruption import bugs as corruption
from campaigns.faulty_disk import bugs as faulty_disk
from campaigns.layouts import bugs as layouts
from campaigns.rank_crashes import bugs as rank_crashes
from campaigns.retention_histories import bugs as retention

ALL = [
    (module.__name__, bug)
    for module in (corruption, faulty_disk, layouts, rank_crashes, retention, seeded_bugs)
    for bug in getattr(module, "BUGS", ())
]


@pytest.mark.parametrize(("campaign", "bug"), ALL, ids=lambda one: getattr(one, "name", None) or "")
def test_a_seeded_bug_can_be_put_in(campaign: str, bug: Any) -> None:
    with bug.patch():
        pass


def test_every_campaign_is_looked_at() -> None:
    assert len({name for name, _ in ALL}) == 6 and len(ALL) > 80
