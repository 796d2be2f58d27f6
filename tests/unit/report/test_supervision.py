"""What a report makes of the journals of `tenuto run`: what each end cost, and how much of the time was of use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from tenuto.cli import main
from tenuto.errors import UsageError
from tenuto.report.facts import report
from tenuto.report.supervision import supervisions


def journal(path: Path, *lines: dict[str, Any], where: str = "/ckpts") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    every = [
        {"at": 0, "event": "supervising", "command": ["train.py", "--api-key=hush"]},
        {"at": 1, "event": "training", "where": where, "run": "main"},
        *lines,
    ]
    texts = []
    for line in every:
        at = line.pop("at")
        texts.append(json.dumps({"time": f"2026-11-23T12:{at // 60:02d}:{at % 60:02d}.000+00:00", **line}))
    path.write_text("\n".join([*texts[:2], "{half a line", '{"event": "of another program"}', *texts[2:]]) + "\n")
    return path


STORM: list[dict[str, Any]] = [
    {"at": 100, "event": "died", "kind": "killed", "evidence": "SIGKILL", "step": 50},
    {"at": 100, "event": "restarting", "how": ""},
    {"at": 110, "event": "resumed", "step": 49},
    {"at": 120, "event": "recovered", "step": 51},
    {"at": 300, "event": "died", "kind": "unhealthy", "evidence": "loss is nan", "step": 140},
    {"at": 300, "event": "restarting", "how": "from step 100, before what went wrong"},
    {"at": 310, "event": "resumed", "step": 100},
    {"at": 320, "event": "died", "kind": "hung", "evidence": "no step", "step": 105},
    {"at": 330, "event": "resumed", "step": 104},
    {"at": 400, "event": "recovered", "step": 141},
    {"at": 1000, "event": "ended", "status": 0, "reason": "the training is done", "step": 500},
]


def test_each_end_has_its_cost_and_time_is_counted_once(tmp_path: Path) -> None:
    (one,) = supervisions([journal(tmp_path / "a.jsonl", *map(dict, STORM))])
    assert [(each.kind, each.lost_steps, each.lost_s) for each in one.outages] == [
        ("killed", 1, 20.0), ("unhealthy", 40, 100.0), ("hung", 1, 80.0),
    ]  # fmt: skip
    assert one.outages[1].how == "from step 100, before what went wrong"
    assert (one.lost_s, one.ettr, one.step, one.status) == (120.0, 0.88, 500, 0)


def test_one_that_was_cut_off_counts_what_it_had_not_made_good(tmp_path: Path) -> None:
    lines = [*map(dict, STORM[:1]), {"at": 200, "event": "started", "start": 2, "pid": 7}]
    (one,) = supervisions([journal(tmp_path / "a.jsonl", *lines)])
    assert (one.lost_s, one.ettr, one.reason, one.outages[0].lost_s) == (100.0, 0.5, "", None)


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(UsageError, match="is not a journal of tenuto run"):
        supervisions([tmp_path / "text"])
    with pytest.raises(UsageError, match="cannot be read: no such file"):
        supervisions([tmp_path / "nothing"])


def test_a_page_has_the_journals_of_its_repository_and_none_of_their_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    tenuto.save({"w": np.zeros(3)}, tmp_path / "ckpts", step=1)
    journals = tmp_path / "state" / "tenuto" / "journals"
    journal(journals / "a.jsonl", *map(dict, STORM), where=str(tmp_path / "ckpts"))
    journal(journals / "b.jsonl", {"at": 5, "event": "died", "kind": "killed", "step": 9}, where="/elsewhere")
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "ckpts"), "--json"])
    found = json.loads(capsys.readouterr().out)["supervision"]
    assert [(one["journal"], one["ettr"]) for one in found] == [(str(journals / "a.jsonl"), 0.88)]
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "ckpts"), "-o", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    for words in (
        "Effective training time",
        "88 %",
        "Steps trained again (RPO)",
        "Time to a new step (RTO)",
        "loss is nan",
    ):
        assert words in page
    assert "hush" not in page and "elsewhere" not in page


def test_a_repository_that_nobody_supervised_says_nothing_of_it(tmp_path: Path) -> None:
    tenuto.save({"w": np.zeros(3)}, tmp_path, step=1)
    found = report(tenuto.Repository(tmp_path).repo)
    assert found.supervision == () and "what it cost" not in found.to_html()
