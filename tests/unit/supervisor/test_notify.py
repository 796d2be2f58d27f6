"""What people are told of a supervised training: which events, how often, by whom, and that no secret is printed."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.supervised import SRC, TENUTO, finished
from tenuto.errors import UsageError
from tenuto.supervisor.decide import HOUR_S
from tenuto.supervisor.notify import Message, Repeats, message_of, redacted, urls_of


@contextmanager
def server(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the URL of a local service, and what it is sent."""
    heard: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"json://user:hush@127.0.0.1:{http.server_port}/hush", heard
        finally:
            http.shutdown()
            thread.join()


DIES = """
import os, numpy as np, tenuto
with tenuto.Checkpointer("ckpts", {"w": np.zeros(3)}, save=tenuto.every(steps=1)) as ckpt:
    for step in ckpt.steps(9):
        ckpt.wait()
        if step == (2, 5, None)[tenuto.restart().number]:
            raise ValueError("bad data")
"""


def test_its_deaths_are_told_once_an_hour_and_its_end_always(tmp_path: Path) -> None:
    with server() as (url, heard):
        done = finished(tmp_path, DIES, "--notify", url)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("started again") == 2
    assert [(one["type"], one["title"].partition(" on ")[0]) for one in heard] == [
        ("warning", "train.py"), ("info", "train.py"), ("success", "train.py"),
    ]  # fmt: skip
    assert [one["title"].rpartition(": ")[2] for one in heard] == ["failed", "recovered", "done"]
    assert heard[0]["message"] == "ValueError: bad data at step 2"
    noted = (tmp_path / "journal.jsonl").read_text()
    assert "hush" not in done.stderr + done.stdout + noted


def test_a_service_that_refuses_is_named_without_its_secrets_and_stops_nothing(tmp_path: Path) -> None:
    with server(status=500) as (url, heard):
        done = finished(tmp_path, "raise SystemExit(3)", "--in-vain", "1", "--notify", url)
    assert done.returncode == 3 and [one["title"].rpartition(": ")[2] for one in heard] == ["failed", "given up"]
    assert "a notification could not be sent to json://…" in done.stderr and "hush" not in done.stderr


@pytest.mark.parametrize(
    ("options", "without", "message"),
    [
        (["--notify", "nowhere://hush"], False, "apprise cannot send to nowhere://…"),
        (["--notify", "env:NOT_THERE"], False, "NOT_THERE is not set"),
        (["--notify", "json://localhost/hush"], True, "notifications need apprise\nhint: pip install"),
    ],
)
def test_what_cannot_be_sent_to_is_refused_before_the_start(
    tmp_path: Path, options: list[str], without: bool, message: str
) -> None:
    hidden = ["-c", "import sys; sys.modules['apprise'] = None\n" + TENUTO[2]] if without else TENUTO[1:]
    done = subprocess.run(
        [TENUTO[0], *hidden, "run", *options, "--", "touch", "began"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SRC}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0 and message in done.stderr
    assert "hush" not in done.stderr and not (tmp_path / "began").exists()


def test_messages_that_are_alike_are_counted_within_an_hour() -> None:
    repeats, message = Repeats(), Message("warning", "killed", "SIGKILL", "died killed")
    assert repeats.admit(message, 0.0) == message
    assert repeats.admit(message, 10.0) is None and repeats.admit(message, 20.0) is None
    assert repeats.admit(Message("warning", "hung", "no step", "died hung"), 30.0) is not None
    later = repeats.admit(message, HOUR_S)
    assert later is not None and later.text == "SIGKILL (and 2 times more since the last message)"
    always = Message("failure", "given up", "why")
    assert repeats.admit(always, 0.0) == repeats.admit(always, 1.0) == always


def test_findings_are_told_where_they_are_severe() -> None:
    facts = {"finding": "disk-filling", "subject": "/a", "severity": "severe", "evidence": "full in 10 min"}
    found = message_of("finding", facts, "train.py on a")
    assert found == Message("warning", "train.py on a: disk-filling", "full in 10 min", "finding disk-filling /a")
    assert message_of("finding", {**facts, "severity": "routine"}, "x") is None
    assert message_of("started", {"start": 1, "pid": 7}, "x") is None


def test_an_end_that_another_node_has_brought_about_is_not_told_once_more() -> None:
    died = {"kind": "another node", "evidence": "node 1: killed (SIGKILL)", "step": 7}
    assert message_of("died", died, "x") is None and message_of("died", {**died, "kind": "killed"}, "x") is not None


def test_urls_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOM", "json://a json://b")
    assert urls_of(["slack://c", "env:WHOM"]) == ["slack://c", "json://a", "json://b"]
    with pytest.raises(UsageError, match="NOT_THERE"):
        urls_of(["env:NOT_THERE"])
    assert redacted("slack://token/token") == "slack://…" and redacted("hush") == "…"
