"""Every bug that a campaign seeds can still be put in: code that it patches may have moved since the campaign ran."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.testing import seeded_bugs
from holdfast.testing.corruption import bugs as corruption
from holdfast.testing.faulty_disk import bugs as faulty_disk
from holdfast.testing.layouts import bugs as layouts
from holdfast.testing.rank_crashes import bugs as rank_crashes
from holdfast.testing.retention_histories import bugs as retention

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
