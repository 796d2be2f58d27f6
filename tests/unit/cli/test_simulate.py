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
