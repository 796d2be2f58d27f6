"""torch's generators, and what a certificate says of a torch state."""

from __future__ import annotations

import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tenuto.errors import StateMismatch
from tenuto.integrations.torch import rng as torch_rng
from tenuto.integrations.torch.certificate import certificate
from tenuto.integrations.torch.data import iteration
from tenuto.state.position import rng
from tenuto.state.position.positions import attach
from tenuto.training import snapshot as plain


def test_torch_draws_repeat() -> None:
    saved = rng.capture()
    first = torch.rand(4)
    assert rng.apply(saved) == ()
    assert torch.equal(torch.rand(4), first)


def test_a_foreign_state_is_refused_and_an_absent_device_is_told() -> None:
    with pytest.raises(StateMismatch, match="cpu"):
        rng.apply({"torch": {"cpu": torch.zeros(3, dtype=torch.uint8)}})
    saved = rng.capture()
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    saved["torch"]["cuda"] = [torch.zeros(16, dtype=torch.uint8)]
    assert "1 CUDA device" in rng.apply(saved)[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_draws_repeat_on_every_device() -> None:
    torch.rand(1, device="cuda")
    saved = rng.capture()
    first = [torch.rand(4, device=f"cuda:{n}") for n in range(torch.cuda.device_count())]
    assert rng.apply(saved) == ()
    assert all(torch.equal(torch.rand(4, device=found.device), found) for found in first)


def test_capturing_does_not_import_a_framework() -> None:
    code = "import sys; from tenuto.state.position import rng; rng.capture(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_the_certificate_names_what_is_and_what_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration, "_iterators", weakref.WeakSet())  # those that other tests are in the middle of
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    found = certificate(state, attach(DataLoader([1, 2, 3], num_workers=0)))
    assert found["exact"] is True and found["reasons"] == [] and found["caveats"] == []
    assert {"model", "optimizer", "random generators of torch", "position in the data"} <= set(found["covers"])
    assert found["versions"]["torch"] == torch.__version__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than cores
        workers = certificate(state, attach(DataLoader([1], num_workers=2)))
    assert workers["exact"] is True and workers["caveats"] == []

    model(torch.ones(1, 2)).sum().backward()
    model[1].eval()
    found = certificate({"model": model}, attach(DataLoader(Stream())))
    assert found["exact"] is False
    assert any("Stream" in reason for reason in found["reasons"])
    assert "position in the data" not in found["covers"]
    assert found["caveats"] == [] and found["form"] == {"model": {"eval": ["1"], "frozen": []}}
    assert [gap.partition(":")[0] for gap in found["unknown"]] == ["a model is in the state and no optimizer is"]
    without = plain.certificate(state, None, since=plain.follow_loaders())  # whatever this process has iterated before
    assert any("no data=" in caveat for caveat in without["caveats"])


def test_the_programs_commit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    main = type(sys)("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    identity = plain.code_identity.__wrapped__
    assert identity() is None

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    found = identity()
    assert len(found["commit"]) == 40 and found["dirty"] is False
    script.write_text("pass  # changed\n")
    assert identity()["dirty"] is True
    monkeypatch.setenv("PATH", "")
    assert identity() is None


def test_one_thread_at_a_time_reads_the_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadlock that this prevents depends on load: no short run shows it every time."""
    owned: list[bool] = []
    read = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: owned.append(torch_rng._reading._is_owned()) or read())
    torch_rng.capture()
    assert owned == [True]
