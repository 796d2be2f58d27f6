"""Drills: what another process restores is what was saved, and what it is not is named."""

from __future__ import annotations

import enum
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tenuto
from support.saves_of_ranks import save_jointly
from support.tiny_training import flip_leaf
from tenuto import Tier, Tiers, every, keep
from tenuto.cli import main
from tenuto.cli.views import ages, drill_page
from tenuto.drill.drill import PROVEN, ProvenRestore, plan_drill
from tenuto.drill.restore import clean_environment
from tenuto.drill.resume import compare, later_metrics, steps_to_train
from tenuto.errors import CheckpointNotFound, KeyMissing, RunNotFound, UsageError
from tenuto.model.ids import CheckpointId
from tenuto.repo.notes import add_note, notes
from tenuto.repo.repository import Repo, now_text
from tenuto.store.registry import open_store
from tenuto.testing.object_store import Bucket, SimulatedObjectStore

PACK = "runs/main/a0001/step-00000004/*.safetensors"


def train(where: Any, steps: int = 4, **more: Any) -> None:
    rng = np.random.default_rng(0)
    state = {"w": np.zeros(70_000), "rng": rng, "n": 3}
    more = {"keep": keep.all(), **more}
    with tenuto.Checkpointer(where, state, save=every(steps=2), log="silent", **more) as ckpt:
        for step in ckpt.steps(steps):
            state["w"] += rng.standard_normal(70_000)
            ckpt.log(loss=float(state["w"].sum()), step=step)


SCRIPT = """
import os, sys
import numpy as np, tenuto
rng = np.random.default_rng(0)
state = {"w": np.zeros(70_000), "rng": rng, "n": 3}
scale, steps = float(sys.argv[1]), int(sys.argv[2])
place = os.environ["TENUTO_WHERE"] if len(sys.argv) > 3 else THE_PLACE
with tenuto.Checkpointer(place, state, save=tenuto.every(steps=2), keep=tenuto.keep.all(), log="silent") as ckpt:
    for step in ckpt.steps(steps):
        state["w"] += scale * rng.standard_normal(70_000)
        ckpt.log(loss=float(state["w"].sum()), step=step)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained by a process without torch, which those that restore need not import then either."""
    place = tmp_path_factory.mktemp("drill")
    (place / "train.py").write_text(SCRIPT.replace("THE_PLACE", repr(str(place / "ckpts"))))
    subprocess.run([sys.executable, place / "train.py", "1.0", "4"], check=True)
    return place / "ckpts"


@pytest.fixture
def where(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "ckpts"))


def kinds(where: Any, step: int = 4) -> list[str]:
    return [note.kind for note in notes(Repo.open(open_store(where)), CheckpointId("main", 1, step))]


def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Has the process that restores run this instead."""
    program = tmp_path / "child.py"
    program.write_text(code)
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrapper))


def test_a_whole_checkpoint_is_proven_and_says_so(where: Path) -> None:
    found = tenuto.Repository(where).drill(target_s=3600)
    assert found and found.proven and not found.slow and found.noted == PROVEN
    assert found.restore is not None and found.restore.ok
    assert found.restore.leaves == 3 and found.restore.values > 4 and found.restore.seconds > found.restore.load_s
    (note,) = notes(Repo.open(open_store(where)), found.plan.id)
    assert note.body["place"] == str(where) and note.body["leaves"] == 3


class Colour(enum.Enum):
    RED = 1


def test_a_state_of_modules_optimizers_and_classes_is_proven(tmp_path: Path) -> None:
    """What comes back without its class is compared all the same."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.BatchNorm1d(3))
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 4)).sum().backward()
    adam.step()
    values = {"nan": float("nan"), "big": 2**80, "text": "\ud800", "set": {1, 2}, "path": Path("x"), "red": Colour.RED}
    state = {"model": model, "adam": adam, "tied": model[0].weight, "b": b"x" * 2000, "empty": {}, **values}
    state |= {"a/b": np.zeros(2), "a": {"b": np.ones(2), "~1": 3, "/": 4, "@": torch.nn.Linear(2, 2)}}
    state["of a"] = torch.optim.SGD(state["a"]["@"].parameters(), momentum=0.9)
    state["a"]["@"](torch.ones(2)).sum().backward()
    state["of a"].step()
    state |= {"half": torch.ones(3, dtype=torch.bfloat16), "sparse": torch.eye(4).to_sparse(), "z": np.zeros((0, 3))}
    tenuto.save(state, tmp_path)
    found = tenuto.Repository(tmp_path).drill()
    assert found, found.restore
    assert found.restore is not None and found.restore.leaves > 20


def test_encoded_checkpoints_are_proven(tmp_path: Path) -> None:
    train(tmp_path, encoding="small")
    assert tenuto.Repository(tmp_path).drill()


def test_sealed_checkpoints_are_proven_with_the_key_that_a_stranger_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, key = tmp_path / "ckpts", tmp_path / "key"
    tenuto.save({"x": 1}, where, run="open")
    with pytest.raises(SystemExit):
        main(["key", "add", str(where), "--key-file", str(key)])
    monkeypatch.setenv("TENUTO_KEY_FILE", str(key))
    train(where)
    assert tenuto.Repository(where).drill()
    with pytest.raises(UsageError, match="is sealed"):
        tenuto.Repository(where).drill(2, command=["python"])
    monkeypatch.delenv("TENUTO_KEY_FILE")
    with pytest.raises(KeyMissing, match="no key was given"):
        tenuto.Repository(where).drill()


def test_checkpoints_of_several_ranks_are_compared_box_by_box(tmp_path: Path) -> None:
    repo = Repo.create_or_open(open_store(tmp_path), chunk_bytes=1024)
    save_jointly(repo)
    found = tenuto.Repository(tmp_path).drill()
    assert found, found.restore
    rank = repo.index(repo.manifest(CheckpointId("main", 1, 2)), 1)
    assert found.restore is not None and found.restore.leaves > 3 * len([spec for spec in rank.specs if spec.private])
    flip_leaf(tmp_path, "runs/main/a0001/step-00000002/rank-00001.safetensors", "#private/mine")
    found = tenuto.Repository(tmp_path).drill()
    assert (found.exit_code, found.noted) == (12, "suspect")


def test_flipped_bytes_are_damage_and_the_older_proof_is_named(where: Path) -> None:
    repository = tenuto.Repository(where)
    repository.drill(2)
    flip_leaf(where, PACK, "w")
    found = repository.drill()
    assert not found and found.exit_code == 12 and found.noted == "suspect"
    assert found.before is not None and found.before.id.step == 2
    assert (
        found.restore is not None
        and found.restore.failure is not None
        and "w is damaged" in found.restore.failure.message
    )
    assert kinds(where) == ["suspect"]


def test_a_lost_data_file_is_damage(where: Path) -> None:
    for path in where.glob(PACK):
        path.unlink()
    found = tenuto.Repository(where).drill()
    assert (found.exit_code, kinds(where)) == (12, ["suspect"])


PATCHED = """
import tenuto
load = tenuto.load
def patched(*words, **more):
    found = load(*words, **more)
    {change}
    return found
tenuto.load = patched
from tenuto.drill.child import main
main()
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "del found.state['w']; del found.state['n']",
            "w is missing; n is missing",
        ),
        ("found.state['w'] = found.state['w'].astype('float32')", "w has dtype float32, and float64 was saved"),
        (
            "found.state['w'][-1] += 1; found.state['n'] = 3.0",
            "w has other bytes: first in bytes 524288 and following; n has value 3.0, and 3 was saved",
        ),
    ],
)
def test_a_restore_that_returns_something_else_is_found_out(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, words: str
) -> None:
    child(monkeypatch, tmp_path, PATCHED.format(change=change))
    found = tenuto.Repository(where).drill()
    assert found.restore is not None and "; ".join(map(str, found.restore.wrong)) == words
    assert found.exit_code == 12 and kinds(where) == (["suspect"] if "other bytes" in words else [])


@pytest.mark.parametrize(
    ("code", "words", "status"),
    [
        ("import time; time.sleep(600)", "was not done after 0.5 s", 17),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9", 1),
        ("print('no such library'); raise SystemExit(3)", "ended with status 3; it printed:\n  | no such library", 1),
    ],
)
def test_a_process_that_does_not_restore_proves_nothing_and_damages_nothing(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str, status: int
) -> None:
    child(monkeypatch, tmp_path, code)
    found = tenuto.Repository(where).drill(timeout_s=0.5 if status == 17 else 60)
    assert found.restore is not None and found.restore.failure is not None
    assert words in found.restore.failure.message
    assert (found.exit_code, kinds(where)) == (status, [])


def test_a_stranger_has_nothing_but_keys() -> None:
    given = {"PATH": "p", "AWS_PROFILE": "a", "TENUTO_WHERE": "w", "TENUTO_KEY_FILE": "k", "RANK": "3"}
    assert clean_environment(given) == {"PATH": "p", "AWS_PROFILE": "a", "TENUTO_KEY_FILE": "k"}


def test_a_tier_or_a_copy_is_restored_from_by_itself(tmp_path: Path) -> None:
    fast, slow, copy = tmp_path / "fast", tmp_path / "slow", tmp_path / "copy"
    train(Tiers(Tier(fast), Tier(slow, save=every(steps=2))))
    repository = tenuto.Repository(fast)
    repository.replicate(copy)
    assert repository.drill(place="slow").plan.place == str(slow)
    assert repository.drill(place=copy)
    flip_leaf(slow, PACK, "w")
    found = repository.drill(place="slow")
    assert (found.exit_code, found.noted) == (12, None)  # a copy is damaged, and not the checkpoint
    with pytest.raises(UsageError, match="no location 'nowhere'"):
        repository.drill(place="nowhere")
    tenuto.save({"x": 1}, tmp_path / "other")
    with pytest.raises(UsageError, match="is another repository"):
        repository.drill(place=tmp_path / "other")


def test_what_cannot_be_drilled_is_refused(where: Path, tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        tenuto.Repository(where).drill(run="mian")
    with pytest.raises(CheckpointNotFound):
        tenuto.Repository(where).drill(3)
    tenuto.save({"x": 1}, "memory://drilled")
    with pytest.raises(UsageError, match="memory of this process"):
        tenuto.Repository("memory://drilled").drill()
    with pytest.raises(UsageError, match="nothing to compare"):
        tenuto.Repository(where).drill(4, command=["python"])


def test_notes_are_read_only_where_they_decide_something() -> None:
    bucket = Bucket()
    store = SimulatedObjectStore(bucket)
    with tenuto.Checkpointer(store, {"w": np.arange(30.0)}, save=every(steps=1), keep=keep.all()) as ckpt:
        for _ in ckpt.steps(5):
            pass
    repo = Repo.open(SimulatedObjectStore(bucket))
    for step in (2, 3):
        add_note(repo, CheckpointId("main", 1, step), PROVEN, {"when": f"2020-01-0{step}T00:00:00Z", "place": "there"})

    def looked() -> int:
        return sum("/notes" in request.name for request in bucket.requests)

    bucket.forget()
    assert plan_drill(repo).last is None and not looked()
    plan = plan_drill(repo, due_s=60.0)
    assert plan.last is not None and plan.last.id.step == 3 and plan.due and looked() > 1


def test_nothing_is_done_while_the_last_proof_is_young(where: Path) -> None:
    repository, id = tenuto.Repository(where), CheckpointId("main", 1, 2)
    assert plan_drill(repository.repo, due_s=3600).due
    add_note(repository.repo, id, PROVEN, {"when": now_text(), "place": "x", "seconds": 1, "host": "h"})
    found = repository.drill(due_s=3600)
    assert found and not found.plan.due and found.restore is None and found.before is not None
    add_note(repository.repo, id, PROVEN, {"when": "2020-01-02T03:04:05Z", "place": "x", "seconds": 1, "host": "h"})
    assert plan_drill(repository.repo, due_s=3600).due
    add_note(repository.repo, id, "suspect", {})
    assert plan_drill(repository.repo).last is None


# -- the script --------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(where: Path, tmp_path: Path) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("THE_PLACE", repr(str(where))))
    return [sys.executable, str(path)]


def listed(where: Path) -> list[Path]:
    return sorted(path for path in where.rglob("*") if "notes" not in path.parts)


def test_a_script_trains_on_from_a_copy_as_it_did(where: Path, script: list[str]) -> None:
    before = listed(where)
    found = tenuto.Repository(where).drill(command=[*script, "1.0", "4"])
    assert found, drill_page.rows(found)
    assert found.plan.id.step == 2 and found.resume is not None and found.resume.began == 2
    assert [(one.step, one.metric, one.equal) for one in found.resume.compared] == [
        (4, "loss", True),
        (4, "step", True),
    ]
    assert listed(where) == before and kinds(where, 2) == [PROVEN]
    assert list(where.parent.glob("tenuto-drill-*")) == []


def test_a_script_whose_losses_differ_is_named_with_both(where: Path, script: list[str]) -> None:
    """It also goes by $TENUTO_WHERE, which names the copy."""
    found = tenuto.Repository(where).drill(command=[*script, "2.0", "4", "by variable"], metrics=["loss"])
    assert found.exit_code == 20 and found.noted is None and found.resume is not None
    (one,) = found.resume.compared
    assert not one.equal and one.logged != one.recorded
    assert kinds(where, 2) == []
    assert any(name == "differs" and "step 4: loss" in text for name, text in drill_page.rows(found))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["1.0", "3"], "after 3 steps, and 4 were wanted"),
        (["one", "4"], "without building a Checkpointer"),
    ],
)
def test_a_script_that_fails_is_not_the_checkpoints_fault(
    where: Path, script: list[str], words: list[str], said: str
) -> None:
    found = tenuto.Repository(where).drill(command=[*script, *words])
    assert found.resume is not None and found.resume.failure is not None and said in found.resume.failure.message
    assert (found.exit_code, kinds(where, 2)) == (22, [])


def test_a_script_for_another_repository_is_stopped(where: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    path.write_text(f"import tenuto\nwith tenuto.Checkpointer({str(tmp_path / 'x')!r}, {{'a': 1}}) as c:\n  pass\n")
    found = tenuto.Repository(where).drill(command=[sys.executable, str(path)])
    assert found.resume is not None and found.resume.failure is not None
    assert "cannot be drilled: its Checkpointer is for" in found.resume.failure.message
    assert not (tmp_path / "x").exists()


def test_metrics_are_compared_bit_for_bit_or_within_a_tolerance() -> None:
    nan = float("nan")
    recorded = {2: {"a": 1.0, "b": nan}, 4: {"a": 0.0}, 9: {"a": 5.0}}
    logged = {2: {"a": 1.0 + 1e-12, "b": nan}, 4: {}}

    def outcome(tolerance: float) -> list[tuple[int, str, bool]]:
        return [(one.step, one.metric, one.equal) for one in compare(recorded, logged, 8, tolerance)]

    assert outcome(0.0) == [(2, "a", False), (2, "b", True), (4, "a", False)]
    assert outcome(1e-9) == [(2, "a", True), (2, "b", True), (4, "a", False)]
    assert [one.equal for one in compare({1: {"a": 0.0}}, {1: {"a": -0.0}}, 1, 0.0)] == [False]


def test_the_yardstick_is_the_line_that_the_checkpoint_is_on(where: Path) -> None:
    train(where, steps=6, resume_from=2)
    repo = Repo.open(open_store(where))
    assert list(later_metrics(repo, CheckpointId("main", 1, 2))) == [4, 6]
    assert list(later_metrics(repo, CheckpointId("main", 1, 4))) == []
    assert steps_to_train(CheckpointId("main", 1, 2), {4: {}, 6: {}}, None) == 2
    assert steps_to_train(CheckpointId("main", 1, 2), {4: {}, 6: {}}, 5) == 5
    with pytest.raises(UsageError, match="nothing to compare") as refused:
        steps_to_train(CheckpointId("main", 1, 2), {6: {}}, 3)
    assert refused.value.hint == "--steps 4"


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("TENUTO_WHERE", raising=False)

    def run(*words: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in words])
        found = capsys.readouterr()
        return int(caught.value.code or 0), found.out, found.err

    return run


def test_the_command_reports_as_text_json_and_a_page(
    cli: Any, where: Path, script: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "drill.html"
    status, out, err = cli("drill", where, "2", "--html", page, "--json", "--", *script, "1.0", "4")
    assert status == 0, err
    found = json.loads(out)
    assert found["schema"] == "tenuto.drill/1" and found["proven"] and found["resume"]["compared"][0]["equal"]
    text = page.read_text()
    assert "PROVEN: main/a0001/2" in text and "prefers-color-scheme: dark" in text and "src=" not in text
    page.with_name("mine.html").write_text("<html>mine</html>")
    status, _, err = cli("drill", where, "2", "--html", page.with_name("mine.html"))
    assert status == 2 and "is not a page of a drill" in err and len(kinds(where, 2)) == 1
    assert page.with_name("mine.html").read_text() == "<html>mine</html>"
    later = ages.clock() + 3 * 86400
    monkeypatch.setattr(ages, "clock", lambda: later)
    assert "restorable: proven 3 days ago" in cli("ls", where)[1]
    assert "restorable  proven 3 days ago, in " in cli("show", where, "--step", "2")[1]
    status, out, _ = cli("drill", where, "--due", "7d")
    assert status == 0 and out.startswith("NOT DUE: main/a0001/2")
    status, out, _ = cli("drill", where, "--dry-run", "--target", "60s")
    assert status == 0 and "target" in out and kinds(where) == []
    assert cli("drill", where, "4", "--target", "1ms")[0] == 2


def test_the_command_leaves_with_what_went_wrong(cli: Any, where: Path) -> None:
    assert cli("drill", where, "--target", "0.001s")[0] == 27
    flip_leaf(where, PACK, "w")
    status, out, err = cli("drill", where)
    assert status == 12 and "NOT PROVEN" in out and "hint: " in err
    assert "no older checkpoint of run main was" in out.replace("\n", " ")
    status, _, err = cli("drill", where, "2", "--html", where / "no" / "page.html")
    assert status == 2 and "cannot be written" in err and kinds(where, 2) == [PROVEN]
    page = where.parent / "drill.html"
    cli("drill", where, "2", "--html", page)
    assert cli("drill", where, "2", "--html", page)[0] == 0 and "PROVEN" in page.read_text()
    assert not list(page.parent.glob(".drill.html*"))
    status, _, err = cli("drill", where, "2", "4")
    assert status == 2 and "takes one checkpoint" in err


def test_a_note_of_another_version_is_still_a_proof() -> None:
    found = ProvenRestore.of(CheckpointId("main", 1, 2), {"when": 3, "seconds": "x"})
    assert (found.when, found.seconds, found.age_s("2020-01-02T03:04:05Z")) == ("3", 0.0, None)
