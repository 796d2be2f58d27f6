"""`tenuto report`: the page, the line about it, and the same as JSON."""

import json
import sys

import pytest


def test_it_writes_a_page_and_says_what_needs_attention(cli, place, tmp_path):
    out = tmp_path / "report.html"
    status, printed, _ = cli("report", place, "-o", out, "--title", "Mine & yours")
    assert status == 0 and printed.startswith(str(out)) and "note: gpt: a resume from" not in printed
    assert "KiB" in printed and printed.count("\n") == 1
    assert "<title>Mine &amp; yours</title>" in out.read_text()


def test_damage_is_named_first(cli, place, tmp_path):
    pack = place / "runs/gpt/a0002/step-00000007/rank-00000.safetensors"
    pack.write_bytes(pack.read_bytes()[:99])
    _, printed, _ = cli("report", place, "-o", tmp_path / "report.html")
    assert "damage: gpt: the latest is damaged: a resume falls back to step 5" in printed


def test_as_json_no_page_is_made(cli, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _, printed, _ = cli("report", place, "--run", "gpt", "--json")
    found = json.loads(printed)
    assert found["schema"] == "tenuto.report/1" and [run["run"] for run in found["runs"]] == ["gpt"]
    assert [save["id"]["step"] for save in found["runs"][0]["saves"]] == [2, 4, 6, 8, 5, 7]
    assert found["runs"][0]["saves"][2]["metrics"]["val_loss"] == "nan"
    assert not [one for one in tmp_path.iterdir() if one.suffix == ".html"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--run", "gtp"), 11, "no run 'gtp'"),
        (("-o", "mine.html"), 2, "is not a report"),
        (("-o", "nowhere/report.html"), 18, "cannot be written"),
    ],
)
def test_what_it_refuses(cli, place, tmp_path, monkeypatch, words, status, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.html").write_text("<html>")
    found, _, said = cli("report", place, *words)
    assert found == status and message in said and "hint: " in said
    assert (tmp_path / "mine.html").read_text() == "<html>"


def test_without_the_extra_it_says_what_to_install(cli, place, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    status, _, said = cli("report", place, "-o", tmp_path / "report.html")
    assert status == 3 and "hint: pip install '.[report]'" in said
