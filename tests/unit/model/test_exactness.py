"""The four verdicts, and what each rests on."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.model.exactness import because, exactness, in_words, judged

PROOF = {"created": "2030-01-02T03:04:05Z", "saved": 10, "last": 20}


@pytest.mark.parametrize(
    ("certificate", "verdict", "exact", "words"),
    [
        ({}, "no known gap", True, "no known gap"),
        ({"unknown": ["u"]}, "unknown", False, "unknown: u"),
        ({"reasons": ["r", "s"], "unknown": ["u"], "proof": PROOF}, "not exact", False, "not exact: r (and 1 more)"),
        (
            {"unknown": ["u"], "proof": PROOF},
            "proven",
            True,
            "proven: tenuto certify, 2030-01-02T03:04:05Z: killed after step 10 and compared up to step 20",
        ),
    ],
)
def test_the_verdict_follows_from_what_is_known(
    certificate: dict[str, Any], verdict: str, exact: bool, words: str
) -> None:
    found = judged(certificate)
    assert (found["verdict"], found["exact"], exactness(found), in_words(found)) == (verdict, exact, verdict, words)


def test_without_a_certificate_nothing_is_said() -> None:
    for certificate in ({}, {"verdict": "fine"}, {"verdict": ["proven"]}):
        assert (exactness(certificate), because(certificate), in_words(certificate)) == (None, (), "")
