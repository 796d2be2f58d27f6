"""`tenuto simulate`, as its help shows it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tenuto.cli.application import run
from tenuto.cli.commands.simulate import EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES.splitlines())
def test_the_examples_run(
    example: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        run(example.split()[1:])
    assert not left.value.code
    out = capsys.readouterr().out
    assert out.startswith("effective training time ratio 0.9")
    if "16384" in example:
        assert out.startswith("effective training time ratio 0.9875\n") and "21,233,664 GPU hours" in out


def test_a_predictor_is_worth_what_it_foresees(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        with pytest.raises(SystemExit):
            run(["simulate", "--stall", "2m", "--mtbf", "12h", "--days", "300", *words])
        return "".join(capsys.readouterr())

    without, good, late = said(), said("--predictor", "0.8,0.6,5m"), said("--predictor", "0.8,0.6,10s")
    assert without.startswith("effective training time ratio 0.926") and "alarms" not in without
    assert good.startswith("effective training time ratio 0.948") and "2 min 30 s of work are at stake" in good
    assert late.startswith("effective training time ratio 0.926") and "come too late for a save" in late
    assert "--predictor 0.8,0.6,5m" in said("--predictor", "0.8,0.6")


@pytest.mark.parametrize(("name", "begins"), [("costs.svg", b"<?xml"), ("costs.PNG", b"\x89PNG")])
def test_a_picture_is_drawn(name: str, begins: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as left:
        run(["simulate", "--stall", "20s", "--mtbf", "6h", "--plot", str(tmp_path / name)])
    drawn = (tmp_path / name).read_bytes()
    assert not left.value.code and drawn.startswith(begins)
    if name.endswith("svg"):
        for text in ("Effective training time ratio 0.95", "this job: a save after each 15 min 16 s", "done again"):
            assert text in drawn.decode()


def test_a_picture_that_cannot_be_drawn_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(name: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as left:
            run(["simulate", "--plot", str(tmp_path / name)])
        return left.value.code, capsys.readouterr().err

    assert said("costs.pdf")[0] == 2
    code, err = said("absent/costs.svg")
    assert code == 2 and "cannot be written: no such file or directory" in err
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    code, err = said("costs.svg")
    assert code == 3 and "--plot needs matplotlib" in err and ".[report]" in err
    assert not list(tmp_path.iterdir())
