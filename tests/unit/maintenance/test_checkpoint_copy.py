"""Copies of checkpoints under another name: exact, sharing bytes within a repository, all or none."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenuto
from support.saves_of_ranks import save_jointly, whole
from support.tiny_training import flip
from tenuto import every, keep
from tenuto.cli import main
from tenuto.crashpoints import armed
from tenuto.errors import CheckpointNotFound, CorruptionError, RemovalRefused, RunInUse, RunNotFound, UsageError
from tenuto.maintenance import gc, undelete
from tenuto.maintenance.checkpoint_copy import execute, plan_copies
from tenuto.maintenance.remove import execute as execute_removal
from tenuto.maintenance.remove import plan_remove
from tenuto.maintenance.rename_run import execute as execute_rename
from tenuto.maintenance.rename_run import plan_rename
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.repo.notes import add_note
from tenuto.repo.refs import put_ref
from tenuto.repo.repository import Repo
from tenuto.store.memory import MemoryStore
from tenuto.store.registry import open_store

_names = itertools.count()


def killed_at(point: str, after: int, work: Callable[[], object]) -> bool:
    """Does this in a process that is killed when it comes to `point` for the `after`th time; whether it did."""
    child = os.fork()
    if not child:
        left = [after]

        def die() -> None:
            left[0] -= 1
            if not left[0]:
                os._exit(9)

        try:
            with armed(point, die):
                work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def trained(where: Any, steps: int = 3, **more: Any) -> None:
    """A run whose weight moves and whose rest does not."""
    state = {"frozen": np.random.default_rng(0).random(100_000), "w": np.zeros(1000), "name": "a", "n": 2**70}
    more = {"keep": keep.all(), **more}
    with tenuto.Checkpointer(where, state, save=every(steps=1), log="silent", **more) as ckpt:
        for step in ckpt.steps(steps):
            state["w"][:] = step + 1
            ckpt.log(loss=1 / (step + 1))


def w(where: Any, **more: Any) -> float:
    found = tenuto.load(where, **more).state
    assert found["name"] == "a" and found["n"] == 2**70
    assert np.array_equal(found["frozen"], np.random.default_rng(0).random(100_000))
    return float(found["w"][0])


def size(where: Path) -> int:
    return sum(path.stat().st_size for path in where.rglob("*") if path.is_file())


def repo_at(where: Any) -> Repo:
    return Repo.open(open_store(where))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    trained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("encoding", ["plain", "dedupe", "small"])
def test_a_copy_within_a_repository_shares_its_bytes_and_outlives_its_source(tmp_path: Path, encoding: str) -> None:
    trained(tmp_path, encoding=encoding)
    before = size(tmp_path)
    done = tenuto.Repository(tmp_path).copy_to(to_run="fork", steps=[2, 3])
    assert [(str(one.source), str(one.id), one.bytes) for one in done.checkpoints] == [
        ("main/a0001/2", "fork/a0001/2", 0),
        ("main/a0001/3", "fork/a0001/3", 0),
    ]
    assert size(tmp_path) - before < 40_000
    repo = repo_at(tmp_path)
    assert all(repo.manifest(one.id).content == repo.manifest(one.source).content for one in done.checkpoints)
    assert tenuto.Repository(tmp_path).metrics(done.checkpoints[0].id) == {"loss": 0.5}
    ids = tenuto.Repository(tmp_path).checkpoints("main")
    execute_removal(repo, plan_remove(repo, ids, force=True))
    gc.execute(repo, gc.plan_gc(repo, now=True))
    assert (w(tmp_path, run="fork"), w(tmp_path, run="fork", step=2)) == (3, 2)
    assert_whole(repo)
    trained(tmp_path, steps=5, run="fork", encoding=encoding, keep=keep.latest(1))
    assert w(tmp_path, run="fork") == 5


def test_a_copy_of_a_copy_rests_on_the_first(source: Path) -> None:
    tenuto.Repository(source).copy_to(to_run="one")
    tenuto.Repository(source).copy_to(run="one", to_run="two", to_step=9)
    repo = repo_at(source)
    execute_removal(repo, plan_remove(repo, tenuto.Repository(source).checkpoints("one"), force=True))
    gc.execute(repo, gc.plan_gc(repo, now=True))
    assert w(source, run="two", step=9) == 3
    assert_whole(repo)


@pytest.mark.parametrize("encoding", ["plain", "dedupe", "small"])
def test_into_another_repository_every_byte_goes(tmp_path: Path, encoding: str) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    trained(here, encoding=encoding)
    done = tenuto.Repository(here).copy_to(there, steps=[1, 3], to_run="fork")
    assert all(one.bytes > 100_000 for one in done.checkpoints)
    one, two = repo_at(here), repo_at(there)
    assert one.id != two.id and not two.manifest(done.checkpoints[1].id).bases
    assert two.manifest(done.checkpoints[1].id).content == one.manifest(done.checkpoints[1].source).content
    for path in here.rglob("*"):
        if path.is_file():
            path.unlink()
    assert (w(there, run="fork"), w(there, run="fork", step=1)) == (3, 1)
    assert_whole(two)


@pytest.mark.parametrize("to", ["run", "repository", "repository from a copy that shares"])
def test_checkpoints_of_several_ranks_keep_their_boxes(to: str) -> None:
    repo = Repo.create_or_open(MemoryStore(f"copied-{to}"), chunk_bytes=1024)
    (id, _) = save_jointly(repo)
    if "shares" in to:
        id = execute(repo, plan_copies(repo, [id], run="shared")).checkpoints[0].id
    target = MemoryStore(f"copied-{to}-to") if to != "run" else None
    made = execute(repo, plan_copies(repo, [id], to=target, run="fork"), target).checkpoints[0]
    there = repo if target is None else Repo.open(target)
    before, after = repo.manifest(id), there.manifest(made.id)
    assert (after.content, after.tree, len(after.indexes)) == (before.content, before.tree, 3)
    found = tenuto.load(there.store, run="fork").state["model"]
    assert all(np.array_equal(found[name], array) for name, array in whole(1)["model"].items())
    for rank in range(3):
        assert there.index(after, rank).private == repo.index(before, rank).private
    assert_whole(there)


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    steps=st.integers(1, 3),
    encoding=st.sampled_from(["plain", "dedupe", "small"]),
    hops=st.lists(st.sampled_from(["run", "whole", "repository"]), min_size=1, max_size=4),
)
def test_however_it_is_copied_it_stays_the_same(sizes: list[int], steps: int, encoding: Any, hops: list[str]) -> None:
    name = f"hops-{next(_names)}"
    repo = Repo.create_or_open(MemoryStore(name), chunk_bytes=64)
    states = [{str(n): np.arange(size) % (7 + step) for n, size in enumerate(sizes)} for step in range(steps)]
    for state in states:
        tenuto.save(state, repo.store, encoding=encoding)
    id, content = CheckpointId("main", 1, steps - 1), repo.manifest(CheckpointId("main", 1, steps - 1)).content
    for number, hop in enumerate(hops):
        to = MemoryStore(f"{name}-{number}") if hop == "repository" else None
        plan = plan_copies(repo, [id], to=to, run=f"r{number}", stand_alone=hop == "whole")
        id = execute(repo, plan, to).checkpoints[0].id
        repo = repo if to is None else Repo.open(to)
        assert repo.manifest(id).content == content
        if any(sizes):  # else there is nothing to share
            assert bool(repo.manifest(id).bases) == (hop == "run")
    found = tenuto.load(repo.store, run=id.run, log="silent").state
    assert all(np.array_equal(found[name], array) for name, array in states[-1].items())
    assert_whole(repo)


def test_a_training_resumes_from_a_fork_elsewhere_bit_for_bit(tmp_path: Path) -> None:
    def train(where: Any, steps: int, run: str = "main") -> Any:
        rng = np.random.default_rng(0)
        state = {"w": np.zeros(50), "rng": rng}
        with tenuto.Checkpointer(where, state, run=run, save=every(steps=2), keep=keep.all(), log="silent") as ckpt:
            for _ in ckpt.steps(steps):
                state["w"] += rng.standard_normal(50)
        return state["w"]

    reference = train(tmp_path / "whole", 8)
    train(tmp_path / "here", 6)
    tenuto.Repository(tmp_path / "here").copy_to(tmp_path / "there", steps=[4], to_run="fork")
    assert np.array_equal(train(tmp_path / "there", 8, "fork"), reference)


@pytest.mark.parametrize("point", ["save begun", "copies put, none visible"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_copy_that_is_cut_off_shows_nothing_and_can_be_made_again(
    source: Path, tmp_path: Path, point: str, elsewhere: bool
) -> None:
    to = tmp_path / "there" if elsewhere else None
    repository = tenuto.Repository(source)
    assert killed_at(point, 1, lambda: repository.copy_to(to, steps=[1, 2], to_run="fork"))
    there = tenuto.Repository(to or source)
    assert there.checkpoints("fork") == []
    assert len(repository.copy_to(to, steps=[1, 2], to_run="fork").checkpoints) == 2
    assert w(to or source, run="fork") == 2
    assert_whole(there.repo)


def test_damage_is_not_copied(source: Path, tmp_path: Path) -> None:
    flip(source, "runs/main/a0001/step-00000003/*.safetensors", 9000)
    with pytest.raises(CorruptionError):
        tenuto.Repository(source).copy_to(tmp_path / "there")
    assert tenuto.Repository(tmp_path / "there").runs() in ([], ["main"])
    assert tenuto.Repository(tmp_path / "there").checkpoints() == []
    add_note(repo_at(source), CheckpointId("main", 1, 3), "suspect", {})
    with pytest.raises(CorruptionError, match="known to be damaged"):
        tenuto.Repository(source).copy_to(to_run="fork")


def test_what_makes_no_sense_is_refused(source: Path, tmp_path: Path) -> None:
    repository = tenuto.Repository(source)
    for more, words in [
        ({}, "where they come from"),
        ({"to": source}, "where they come from"),
        ({"to_run": "x", "steps": [1, 2], "to_step": 4}, "for one checkpoint"),
        ({"to_run": "no/name"}, "cannot name a run"),
    ]:
        with pytest.raises(UsageError, match=words):
            repository.copy_to(**more)
    repository.copy_to(to_run="fork", steps=2)
    with pytest.raises(UsageError, match="at step 2 already"):
        repository.copy_to(to_run="fork", steps=[1])
    repository.replicate(tmp_path / "copy")
    with pytest.raises(UsageError, match="is a copy of"):
        repository.copy_to(tmp_path / "copy", to_run="fork")


def test_into_a_run_that_was_not_forked_the_bytes_go_too(source: Path) -> None:
    """What its retention looks at is what rests on others: only runs that were forked from another may."""
    trained(source, steps=1, run="own")
    (made,) = tenuto.Repository(source).copy_to(to_run="own", steps=[3]).checkpoints
    assert made.bytes > 800_000 and not repo_at(source).manifest(made.id).bases
    assert w(source, run="own") == 3


def test_sealed_bytes_are_shared_and_never_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenuto.save({"x": 1}, tmp_path / "source", run="open")
    with pytest.raises(SystemExit):
        main(["key", "add", str(tmp_path / "source"), "--key-file", str(tmp_path / "key")])
    monkeypatch.setenv("TENUTO_KEY_FILE", str(tmp_path / "key"))
    trained(tmp_path / "source")
    repository = tenuto.Repository(tmp_path / "source")
    with pytest.raises(UsageError, match="is sealed"):
        repository.copy_to(tmp_path / "there")
    assert not (tmp_path / "there").exists()
    repository.copy_to(to_run="fork")
    repository.rename_run("fork", "other")
    assert w(tmp_path / "source", run="other") == 3


# -- renaming ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Attempt 1 to step 4, attempt 2 from step 2 to step 5; a tag on a step that was left behind."""
    where = tmp_path / "lines"
    trained(where, steps=4)
    state = {"frozen": np.random.default_rng(0).random(100_000), "w": np.zeros(1000), "name": "a", "n": 2**70}
    with tenuto.Checkpointer(where, state, save=every(steps=1), keep=keep.all(), resume_from=2, log="silent") as ckpt:
        for step in ckpt.steps(5):
            state["w"][:] = 10 * (step + 1)
    tenuto.Repository(where).tag("left", "a0001/4")
    return where


def line(where: Path, run: str) -> list[str]:
    return [str(id).partition("/")[2] for id in tenuto.Repository(where).walk(run) if id.run == run]


def test_a_renamed_run_has_its_lines_tags_and_metrics(lines: Path) -> None:
    before = line(lines, "main")
    times = {id.step: repo_at(lines).manifest(id).created for id in tenuto.Repository(lines).walk()}
    done = tenuto.Repository(lines).rename_run("main", "new")
    assert done.tags == ("left",) and len(done.checkpoints) == 7
    repository = tenuto.Repository(lines)
    assert line(lines, "new") == before
    assert str(repository.find("new", "left")) == "new/a0001/4"
    assert {id.step: repository.repo.manifest(id).created for id in repository.walk("new")} == times
    assert repository.checkpoints("main") == []
    assert (w(lines, run="new"), w(lines, step="left")) == (50, 4)
    gc.execute(repository.repo, gc.plan_gc(repository.repo, now=True))
    assert w(lines, run="new", step=2) == 2
    assert_whole(repository.repo)


@pytest.mark.filterwarnings("ignore:.* is passed over:tenuto.TenutoWarning")
def test_a_renamed_run_stays_rolled_back_whatever_else_lies_there(lines: Path) -> None:
    repository = tenuto.Repository(lines)
    repository.rollback("a0001/2")
    shutil.copytree(lines / "runs/main/a0001", lines / "runs/main/a0900")  # a copy that somebody made by hand
    before = line(lines, "main")
    repository.rename_run("main", "new")
    assert line(lines, "new") == before
    assert repository.latest("new") == CheckpointId("new", 1, 2)


@pytest.mark.parametrize("point", ["attempt claimed", "copies put, none visible", "a copy is visible"])
@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_renaming_that_is_cut_off_is_continued(lines: Path, point: str, after: int) -> None:
    before = line(lines, "main")
    values = {id.step: w(lines, step=f"a{id.attempt:04}/{id.step}") for id in tenuto.Repository(lines).walk()}
    if killed_at(point, after, lambda: tenuto.Repository(lines).rename_run("main", "new")):
        assert line(lines, "main") == before
        tenuto.Repository(lines).rename_run("main", "new")
    repository = tenuto.Repository(lines)
    assert repository.checkpoints("main") == []
    found = {id.step: w(lines, run="new", step=f"a{id.attempt:04}/{id.step}") for id in repository.walk("new")}
    assert found == values


def test_what_needs_the_old_name_keeps_it(lines: Path) -> None:
    repo = repo_at(lines)
    with pytest.raises(RunNotFound, match="there are: main"):
        plan_rename(repo, "mian", "new")
    with pytest.raises(UsageError, match="names that differ only in case"):
        plan_rename(repo, "main", "MAIN")
    put_ref(repo, "pin", "it", CheckpointId("main", 2, 5))
    with pytest.raises(RemovalRefused, match="pin 'it' names"):
        plan_rename(repo, "main", "new")
    trained(lines, steps=1, run="other")
    with pytest.raises(UsageError, match="checkpoints of its own"):
        plan_rename(repo, "other", "main")


def test_a_run_in_use_is_not_renamed(lines: Path) -> None:
    state = {"w": np.zeros(3)}
    with tenuto.Checkpointer(lines, state, run="live", log="silent") as ckpt:
        ckpt.save()
        with pytest.raises(RunInUse):
            plan_rename(repo_at(lines), "live", "new")


def test_a_checkpoint_since_the_plan_ends_the_renaming(source: Path) -> None:
    repo = repo_at(source)
    plan = plan_rename(repo, "main", "new")
    trained(source, steps=4)
    with pytest.raises(RunInUse, match="changed since the plan"):
        execute_rename(repo, plan)
    assert tenuto.Repository(source).checkpoints("new") == []


# -- together with everything else -------------------------------------------------------------------------------------


def test_a_stand_alone_copy_can_be_replicated(source: Path, tmp_path: Path) -> None:
    repository = tenuto.Repository(source)
    (made,) = repository.copy_to(to_run="fork", stand_alone=True).checkpoints
    assert made.bytes > 800_000 and not repository.manifest(made.id).bases
    assert repository.replicate(tmp_path / "copy").ok
    assert w(tmp_path / "copy", run="fork") == 3


def test_the_sources_retention_leaves_what_a_copy_needs(tmp_path: Path) -> None:
    trained(tmp_path, keep=keep.latest(1))
    tenuto.Repository(tmp_path).copy_to(to_run="fork")
    trained(tmp_path, steps=6, keep=keep.latest(1))
    assert [id.step for id in tenuto.Repository(tmp_path).checkpoints()] == [6]
    assert w(tmp_path, run="fork") == 3
    repo = repo_at(tmp_path)
    gc.execute(repo, gc.plan_gc(repo, now=True))
    assert_whole(repo)
    execute_removal(repo, plan_remove(repo, tenuto.Repository(tmp_path).checkpoints("fork"), force=True))
    gc.execute(repo, gc.plan_gc(repo, now=True, force=True))
    gc.execute(repo, gc.plan_gc(repo, now=True, force=True))
    assert not list(tmp_path.glob("runs/main/a0001/step-00000003/*.safetensors"))


def test_a_training_goes_through_its_fork_with_differences(tmp_path: Path) -> None:
    """Saves of the fork name chunks of the copy, which lie with the source."""
    trained(tmp_path, encoding="small")
    tenuto.Repository(tmp_path).copy_to(to_run="fork")
    trained(tmp_path, steps=6, run="fork", encoding="small")
    tenuto.Repository(tmp_path).rename_run("main", "old")
    tenuto.Repository(tmp_path).rename_run("fork", "new")
    assert (w(tmp_path, run="new"), w(tmp_path, run="new", step=4), w(tmp_path, run="old", step=1)) == (6, 4, 1)
    repo = repo_at(tmp_path)
    gc.execute(repo, gc.plan_gc(repo, now=True))
    assert_whole(repo)


def test_a_run_takes_its_old_name_back(source: Path) -> None:
    repository = tenuto.Repository(source)
    repository.rename_run("main", "new")
    repository.rename_run("new", "main")
    assert [id.step for id in repository.walk()][:3] == [3, 2, 1] and repository.checkpoints("new") == []
    trained(source, steps=4)
    assert w(source) == 4
    assert_whole(repository.repo)


def test_what_was_renamed_can_be_brought_back(source: Path) -> None:
    repository = tenuto.Repository(source)
    repository.rename_run("main", "new")
    repo = repository.repo
    undelete.execute(repo, undelete.plan_undelete(repo, CheckpointId("main", 1, 3)))
    assert w(source) == 3 and w(source, run="new") == 3
    assert_whole(repo)


def test_one_of_two_copies_into_one_run_at_once_is_made(source: Path) -> None:
    repository = tenuto.Repository(source)

    def other() -> None:
        with pytest.raises(RunInUse):
            tenuto.Repository(source).copy_to(to_run="fork", steps=[1])

    with armed("copies put, none visible", other):
        repository.copy_to(to_run="fork", steps=[2])
    assert [id.step for id in repository.checkpoints("fork")] == [2]


@pytest.mark.parametrize("after", [1, 2])
def test_a_source_that_is_removed_meanwhile_leaves_no_copy(source: Path, after: int) -> None:
    """Before its copy is begun, or between that and the look whether it is still there."""
    repo, left = repo_at(source), [after]

    def removed() -> None:
        left[0] -= 1
        if not left[0]:
            execute_removal(repo, plan_remove(repo, [CheckpointId("main", 1, 3)], force=True))
            gc.execute(repo, gc.plan_gc(repo, now=True))

    with armed("save begun", removed), pytest.raises(CheckpointNotFound):
        tenuto.Repository(source).copy_to(to_run="fork", steps=[2, 3])
    assert tenuto.Repository(source).checkpoints("fork") == []
    assert_whole(repo)


def test_the_commands_plan_copy_and_ask(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in words])
        found = capsys.readouterr()
        return int(caught.value.code or 0), found.out + found.err

    assert run("cp", source, "2", tmp_path / "there", "--dry-run")[0] == 0 and not (tmp_path / "there").exists()
    status, text = run("cp", source, "2", "3", tmp_path / "there")
    assert status == 0 and "main/a0001/3  -> main/a0001/3" in text and "copied and verified" in text
    assert w(tmp_path / "there", step=2) == 2
    status, text = run("cp", source, "2")
    assert status == 2 and "--to-run NEWRUN" in text
    status, text = run("mv", source, "main", "new")
    assert status == 2 and "--yes" in text and tenuto.Repository(source).checkpoints("new") == []
    status, text = run("mv", source, "main", "new", "--yes")
    assert status == 0 and "undelete" in text
    status, text = run("du", source, "--json")
    assert json.loads(text)["stored"] < 2_600_000  # three states of 800 kB, and nothing twice
