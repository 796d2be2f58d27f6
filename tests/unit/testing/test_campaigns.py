"""What campaigns share: options, the head of a result, progress."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns import result_file
from campaigns.result_file import Progress, ResultHeader, code, deliver, machine, options, versions
from tenuto.version import __version__


def test_a_result_begins_with_what_it_was_obtained_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_file, "code", lambda: {"commit": "4dc1f00", "dirty": False})
    found = ResultHeader("tenuto.testing.one", ["--seed", "7"], seed=7, packages=["numpy"]).result({"cases": 3})
    assert list(found) == ["command", "seed", "seconds", "commit", "dirty", "versions", "machine", "cases"]
    assert found["command"] == "python -m tenuto.testing.one --seed 7"
    assert (found["seed"], found["cases"]) == (7, 3)
    assert found["versions"].keys() == {"python", "tenuto", "numpy"}
    assert found["versions"]["tenuto"] == __version__
    assert found["seconds"] >= 0


def test_the_command_is_the_process_s_own_where_no_arguments_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ignored", "--kills", "20"])
    assert ResultHeader("m", None, seed=1).result({})["command"] == "python -m m --kills 20"
    assert ResultHeader("m", [], seed=1).result({})["command"] == "python -m m"


def test_a_result_names_the_commit_that_it_ran_from_and_whether_the_code_was_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "tenuto"
    here, results = tmp_path / "campaigns" / "result_file.py", tmp_path / "results"
    monkeypatch.setattr(result_file, "__file__", str(here))
    for place in (package, here.parent, results):
        place.mkdir(parents=True)
    here.write_text("pass\n")
    assert code() == {}, "no checkout"

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "train.py").write_text("pass\n")
    git("add", "train.py")
    git("commit", "-q", "-m", "somebody's training")
    assert code() == {}, "a package that is installed within the checkout of something else"
    git("add", ".")
    git("commit", "-q", "-m", "first")
    clean = {"commit": git("rev-parse", "--short", "HEAD"), "dirty": False}
    (results / "r1.json").write_text("{}")
    assert code() == clean, "the results of the campaign before are no code"
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as within a hook
    assert code() == clean
    (tmp_path / "benchmark.py").write_text("pass\n")
    assert code() == clean and code(tmp_path / "*.py") == clean | {"dirty": True}
    (package / "new.py").write_text("pass\n")
    assert code() == clean | {"dirty": True}
    monkeypatch.setenv("PATH", "")
    assert code() == {}, "no git"


def test_what_is_not_installed_or_not_told_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions("no-such-package-at-all")["no-such-package-at-all"] == "absent"
    monkeypatch.setattr(result_file.os.path, "exists", lambda path: False)
    assert (machine()["cpu"], machine()["memory_gib"]) == ("unknown", "unknown")


def test_only_asked_for_options_are_there() -> None:
    alone = options("m", "what").parse_args([])
    assert vars(alone) == {"seed": 1, "json": None}
    all = options("m", "what", seed=0, workers=2, bugs=True).parse_args(["--json", "out", "--no-bugs"])
    assert vars(all) == {"seed": 0, "json": Path("out"), "workers": 2, "no_bugs": True}


def test_a_result_is_written_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deliver({"cases": 3}, tmp_path / "out.json", "three cases")
    assert json.loads((tmp_path / "out.json").read_text()) == {"cases": 3}
    assert capsys.readouterr().out == "three cases\n"
    deliver({"cases": 3}, None)
    assert json.loads(capsys.readouterr().out) == {"cases": 3}


def test_into_a_file_progress_is_told_at_once_and_then_seldom(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(result_file.time, "monotonic", lambda: now)
    log = Progress()
    for line, now in (("first", 100.0), ("too soon", 109.0), ("later", 110.0)):  # noqa: B007 - the lambda above tells it
        log(line)
    log.end()
    assert capsys.readouterr().err == "first\nlater\n"


def test_on_a_terminal_every_line_replaces_the_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    log = Progress()
    log("one")
    log("two")
    log.end()
    assert capsys.readouterr().err == "\r\x1b[Kone\r\x1b[Ktwo\n"
