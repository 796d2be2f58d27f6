"""docs/evidence.md says what the campaigns' committed results say."""

from __future__ import annotations

import json

from campaigns import evidence


def test_the_page_is_made_from_the_results() -> None:
    assert evidence.PAGE.read_text(encoding="utf-8") == evidence.page(), "python -m campaigns.evidence"


def test_every_result_of_a_campaign_is_on_the_page() -> None:
    page = evidence.PAGE.read_text(encoding="utf-8")
    of_campaigns = [
        path.name
        for path in evidence.RESULTS.glob("*.json")
        if "campaigns." in json.loads(path.read_text(encoding="utf-8")).get("command", "")
    ]
    assert of_campaigns
    assert [name for name in of_campaigns if name not in page] == []
