"""`tenuto simulate`, as its help shows it."""

from __future__ import annotations

import pytest

from tenuto.cli.application import run
from tenuto.cli.commands.simulate import EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES.splitlines())
def test_the_examples_run(example: str, capsys: pytest.CaptureFixture[str]) -> None:
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
