"""What a person sees of whether a resume is exact: on stderr of a script, in `show` and `ls`, and of `certify`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import loaded_interpreter

# Six batches an epoch. "habit": as torch.save is called. "passed": its own loop over whole epochs, without data=.
# "given": data= is passed. "module": the same, with a module of the user's beside it.
SCRIPT = """
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import tenuto
from tenuto import every, on

form, where = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4, shuffle=True)


def train(batch):
    optimizer.zero_grad()
    model(batch[0]).square().mean().backward()
    optimizer.step()


if form == "habit":
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 0}
    tenuto.Checkpointer(where, state)
elif form == "given":
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    with tenuto.Checkpointer(where, state, data=loader, save=every(epochs=1)) as ckpt:
        for _ in ckpt.epochs(3):
            for batch in ckpt.batches:
                train(batch)
else:
    state = {"model": model, "optimizer": optimizer}
    if form == "no optimizer":
        del state["optimizer"]
    with tenuto.Checkpointer(where, state, save=every(steps=6) | on.end()) as ckpt:
        ckpt.restore()
        while ckpt.step < 18:
            for batch in loader:
                train(batch)
                ckpt.step_done()
"""
# Numpy alone, which starts quickly. Its module is another file of the user's; a second word in its file of settings
# has it import one more.
PROVEN = """
import sys

import numpy as np
import rates

import tenuto
from tenuto import every, on

end, *more = open(sys.argv[2]).read().split()
for name in more:
    __import__(name)
np.random.seed(0)
state = {"weights": np.random.rand(4)}
batches = [np.full(4, float(number)) for number in range(7)]
with tenuto.Checkpointer(sys.argv[1], state, data=batches, save=every(steps=5) | on.end()) as ckpt:
    for _ in ckpt.steps(int(end)):
        state["weights"] = state["weights"] - rates.RATE * (next(ckpt.batches) + np.random.rand(4))
"""


def run(*arguments: object, torch: bool = False) -> subprocess.CompletedProcess[str]:
    return loaded_interpreter.run([*map(str, arguments)], torch=torch, timeout=120)


def started(*arguments: object) -> subprocess.CompletedProcess[str]:
    """In an interpreter of its own: what certify has proven holds for the modules that the script itself imports."""
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)


def tenuto(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run("-c", "from tenuto.cli import main; main()", *arguments)


def shown(where: Path) -> tuple[str, dict[str, Any]]:
    """Returns what `show` prints of the certificate, and what it gives to a machine."""
    certificate: dict[str, Any] = json.loads(tenuto("show", where, "--json").stdout)["certificate"]
    return tenuto("show", where).stdout, certificate


@pytest.fixture
def script(tmp_path: Path) -> Path:
    found = tmp_path / "train.py"
    found.write_text(SCRIPT)
    return found


def test_snapshots_as_torch_save_takes_them_are_refused_before_anything_is_made(tmp_path: Path, script: Path) -> None:
    done = run(script, "habit", tmp_path / "ckpts", torch=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "tenuto.errors.UsageError: state['model'] is what state_dict() of a module returned: a snapshot, which does "
        "not follow training",
        "  hint: pass `model` itself, not `model.state_dict()`: the Checkpointer reads it at every save",
    ]
    assert not (tmp_path / "ckpts").exists()


@pytest.mark.long
def test_a_number_that_never_counts_is_told_and_what_is_known_is_no_gap(tmp_path: Path, script: Path) -> None:
    done = run(script, "given", tmp_path / "ckpts", torch=True)
    assert done.returncode == 0
    (said,) = [line for line in done.stderr.splitlines() if "TenutoWarning" in line]
    assert "state['epoch'] is 0 as it was 2 epochs ago" in said and "ckpt.epoch" in said
    text, certificate = shown(tmp_path / "ckpts")
    assert (certificate["verdict"], certificate["exact"]) == ("no known gap", True)
    assert "no known gap" in text


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (
            "passed",
            ["training has iterated a DataLoader over TensorDataset, and no data= was given to count its batches"],
        ),
        (
            "no optimizer",
            [
                "a model is in the state and no optimizer is: what the optimizer keeps does not come back",
                "training has iterated a DataLoader over TensorDataset, and no data= was given to count its batches",
            ],
        ),
    ],
)
def test_where_the_data_or_the_optimizer_was_out_of_sight_nothing_is_promised(
    tmp_path: Path, script: Path, form: str, why: list[str]
) -> None:
    done = run(script, form, tmp_path / "ckpts", torch=True)
    assert done.returncode == 0, done.stderr
    text, certificate = shown(tmp_path / "ckpts")
    assert (certificate["verdict"], certificate["exact"], certificate["unknown"]) == ("unknown", False, why)
    assert "no known gap" not in text and "unknown" in text
    listed = tenuto("ls", tmp_path / "ckpts")
    assert "exactness unknown" in listed.stdout
    rows = json.loads(tenuto("ls", tmp_path / "ckpts", "--json").stdout)["runs"][0]["checkpoints"]
    assert "unknown" in {row["verdict"] for row in rows}
    more = f" (and {len(why) - 1} more)" if len(why) > 1 else ""
    assert f", verified; unknown: {why[0]}{more})" in run(script, form, tmp_path / "ckpts", torch=True).stderr


@pytest.mark.long
def test_certify_names_the_missing_data_first(tmp_path: Path, script: Path) -> None:
    where = tmp_path / "ckpts"
    done = tenuto("certify", "--steps", 4, "--more", 4, where, "--", sys.executable, script, "passed", where)
    assert done.returncode == 20, done.stderr
    cause = " ".join(done.stdout.partition("likely cause\n")[2].split())
    assert cause.startswith(
        "no data= was given, and the script iterates a DataLoader over TensorDataset: nothing counts"
    )
    assert "- pass the loader, Checkpointer(..., data=loader), and take its batches from ckpt.batches" in cause
    assert "Not seen" not in done.stdout and not where.exists()


def test_what_certify_has_proven_checkpoints_say_until_the_script_or_its_arguments_change(tmp_path: Path) -> None:
    where, script, module, steps = (tmp_path / name for name in ("ckpts", "train.py", "rates.py", "steps"))
    script.write_text(PROVEN)
    module.write_text("RATE = 0.1\n")
    steps.write_text("10")
    command = [script, where, steps]
    done = tenuto("certify", "--steps", 4, "--more", 4, where, "--", sys.executable, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(
        "Not seen, so nothing is proven of:\n"
        "  -  an accelerator: the script used none\n"
        "  -  any other number of ranks than 1\n"
        "  -  an end by a signal that the script handles: it was killed by SIGKILL\n"
    )
    assert started(*command).returncode == 0
    text, certificate = shown(where)
    assert (certificate["verdict"], certificate["exact"]) == ("proven", True)
    assert (certificate["proof"]["saved"], certificate["proof"]["last"]) == (4, 8)
    assert "proven" in text and "proven exact" in tenuto("ls", where).stdout
    assert tenuto("verify", where).returncode == 0

    module.write_text("RATE = 0.2\n")
    steps.write_text("15")
    assert started(*command).returncode == 0
    assert shown(where)[1]["verdict"] == "no known gap"
    module.write_text("RATE = 0.1\n")
    steps.write_text("20")
    assert started(*command, "--more").returncode == 0
    assert shown(where)[1]["verdict"] == "no known gap"

    (tmp_path / "chosen.py").write_text("import rates\nrates.RATE = 0.3\n")
    for settings, verdict in (("25 chosen", "no known gap"), ("30", "proven")):
        steps.write_text(settings)
        assert started(*command).returncode == 0
        assert shown(where)[1]["verdict"] == verdict, "certify has not seen the chosen file"
