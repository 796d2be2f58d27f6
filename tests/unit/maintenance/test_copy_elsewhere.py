"""Copies of a repository in another store: complete by themselves, continued, compared, pruned and promoted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support.tiny_training import flip
from tenuto.cli import main
from tenuto.crashpoints import armed
from tenuto.errors import CopyDiverged, CorruptionError, RemovalRefused, RepositoryError, StoreFull, UsageError
from tenuto.maintenance import copy_record
from tenuto.maintenance.census import take_census
from tenuto.maintenance.compare_copy import BEHIND
from tenuto.maintenance.copy_elsewhere import execute
from tenuto.maintenance.copy_plan import plan_copy
from tenuto.maintenance.remove import execute as execute_removal
from tenuto.maintenance.remove import plan_remove
from tenuto.maintenance.verify import assert_whole, plan_verify
from tenuto.maintenance.verify import execute as verify
from tenuto.model.ids import CheckpointId
from tenuto.model.records import Receipt
from tenuto.repo.repository import Repo
from tenuto.store.contract import Content, Store
from tenuto.store.registry import open_store
from tenuto.store.wrappers.delegating import DelegatingStore

PACK = "runs/main/a0001/step-{:08d}/rank-00000.safetensors"


def save(where: Path, *values: float) -> None:
    for value in values:
        tenuto.save({"w": np.full(200_000, float(value))}, where)


def loaded(where: Path, **more: Any) -> float:
    w = tenuto.load(where, **more).state["w"]
    assert (w == w[0]).all()
    return float(w[0])


def remove(where: Path, step: int, run: str = "main") -> None:
    """As retention does: nothing of it stays."""
    repo = Repo.open(open_store(where))
    id = CheckpointId(run, 1, step)
    execute_removal(repo, plan_remove(repo, [id], force=True))
    shutil.rmtree(where / id.directory)
    shutil.rmtree(where / "trash", ignore_errors=True)
    shutil.rmtree(where / "tombstones", ignore_errors=True)


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """A repository of three checkpoints and a tag, and where a copy shall lie."""
    source = tmp_path / "source"
    save(source, 0, 1, 2)
    tenuto.Repository(source).tag("good", 1)
    return source, tmp_path / "copy"


def copy(source: Path, to: Any, **more: Any) -> Any:
    report = tenuto.Repository(source).replicate(to, **more)
    assert report.failed == ()
    return report


def steps(report: Any) -> list[int]:
    return [id.step for id in report.copied]


def test_a_copy_is_complete_by_itself(both: tuple[Path, Path]) -> None:
    source, to = both
    report = copy(source, to)
    assert steps(report) == [2, 1, 0] and report.skipped == 0
    shutil.rmtree(source)
    assert loaded(to) == 2 and loaded(to, step="good") == 1
    assert_whole(Repo.open(open_store(to)))


def test_only_what_is_new_is_copied(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    save(source, 3)
    report = copy(source, to)
    assert (steps(report), report.skipped) == ([3], 3)
    again = copy(source, to)
    assert (steps(again), again.skipped, again.bytes) == ([], 4, 0)


def test_nobody_trains_in_a_copy_by_accident(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    with pytest.raises(RepositoryError, match="whose primary is") as refused:
        save(to, 9)
    assert f"tenuto promote {to}" in str(refused.value.hint)
    with pytest.raises(RepositoryError, match="is a copy of"):
        tenuto.save({"w": np.zeros(3)}, tenuto.Mirror(source, to))


@pytest.mark.parametrize("what", ["a primary", "another repository", "the source itself", "a mirror"])
def test_nothing_is_copied_over_something_else(both: tuple[Path, Path], what: str, tmp_path: Path) -> None:
    source, to = both
    if what == "a primary":
        shutil.copytree(source, to)
    elif what == "another repository":
        save(to, 5)
    elif what == "the source itself":
        to = source
    else:
        tenuto.save({"w": np.zeros(3)}, tenuto.Mirror(source, to))
    before = sorted(to.rglob("*"))
    with pytest.raises(RepositoryError, match=r"primary of its own|another repository|own locations"):
        tenuto.Repository(source).replicate(to)
    assert sorted(to.rglob("*")) == before


def test_it_goes_on_where_it_stopped(both: tuple[Path, Path]) -> None:
    """Cut off before a manifest: the checkpoint is not there, what is there of it is not copied again."""
    source, to = both

    class Cut(Exception):
        pass

    def cut() -> None:
        raise Cut

    with armed("packs copied, checkpoint not looked for again", cut), pytest.raises(Cut):
        copy(source, to)
    found = tenuto.Repository(to)
    assert found.checkpoints() == []
    report = copy(source, to)
    assert steps(report) == [2, 1, 0]
    assert report.bytes < 3 * 1_600_000 < report.bytes + 2_000_000  # the newest's data file was there
    assert_whole(Repo.open(open_store(to)))


def test_what_is_removed_while_it_is_copied_leaves_nothing(both: tuple[Path, Path]) -> None:
    source, to = both
    once: list[int] = []

    def removed() -> None:
        if not once:
            once.append(1)
            remove(source, 2)

    with armed("packs copied, checkpoint not looked for again", removed):
        report = copy(source, to)
    assert [id.step for id in report.gone] == [2] and steps(report) == [1, 0]
    assert not (to / PACK.format(2)).parent.exists() or not any((to / PACK.format(2)).parent.iterdir())
    assert_whole(Repo.open(open_store(to)))


def test_two_at_once_do_no_harm_when_the_checkpoint_is_removed(both: tuple[Path, Path]) -> None:
    """The other one has all of it in time: what this one has to take back stays."""
    source, to = both
    once: list[int] = []

    def other() -> None:
        if not once:
            once.append(1)
            copy(source, to)
            remove(source, 2)

    with armed("packs copied, checkpoint not looked for again", other):
        report = tenuto.Repository(source).replicate(to)
    assert [id.step for id in report.gone] == [2]
    assert loaded(to) == 2
    assert_whole(Repo.open(open_store(to)))


class TakenBack(DelegatingStore):
    """Another process takes the newest checkpoint back right before its manifest is put."""

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        if name == CheckpointId("main", 1, 2).manifest:
            self.inner.delete([PACK.format(2)])
        return self.inner.put_if_absent(name, content, token=token)


def test_a_manifest_is_taken_back_where_parts_are_gone_by_then(both: tuple[Path, Path]) -> None:
    source, to = both
    report = tenuto.Repository(source).replicate(TakenBack(open_store(to)))
    assert [id.step for id in report.gone] == [2] and steps(report) == [1, 0]
    assert loaded(to) == 1
    assert steps(copy(source, to)) == [2]


def test_damage_in_the_source_is_not_copied(both: tuple[Path, Path]) -> None:
    source, to = both
    flip(source, PACK.format(1), -3)
    report = tenuto.Repository(source).replicate(to)
    assert steps(report) == [2, 0] and isinstance(report.failed[0], CorruptionError)
    assert tenuto.Repository(to).checkpoints() == [CheckpointId("main", 1, 2), CheckpointId("main", 1, 0)]


class Full(DelegatingStore):
    """Has room for so many data files."""

    def __init__(self, inner: Store, room: int) -> None:
        super().__init__(inner)
        self.room = room

    def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
        if name.endswith(".safetensors"):
            self.room -= 1
            if self.room < 0:
                raise StoreFull(f"{name}: no space left", subject=name)
        return self.inner.put_if_absent(name, content, token=token)


def test_a_full_place_keeps_what_is_whole_and_says_so(both: tuple[Path, Path]) -> None:
    source, to = both
    report = tenuto.Repository(source).replicate(Full(open_store(to), 1))
    assert steps(report) == [2] and len(report.failed) == 1 and isinstance(report.failed[0], StoreFull)
    assert loaded(to) == 2
    assert steps(copy(source, to)) == [1, 0]


# -- what is wrong with a copy ----------------------------------------------------------------------------------------


def checked(source: Path, to: Path, **more: Any) -> tuple[int, list[tuple[str, str]]]:
    found = tenuto.Repository(source).check_copy(to, **more)
    return found.exit_code, [(one.kind, one.object) for one in found.problems]


def test_a_copy_that_lags(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    assert checked(source, to) == (0, [])
    save(source, 3, 4)
    assert checked(source, to)[0] == BEHIND
    assert tenuto.Repository(source).check_copy(to).behind == 2


@pytest.mark.parametrize(
    "pattern", ["manifest.json", "begin.json", "rank-00000.index", "*.safetensors", "attempt.json"]
)
def test_a_flipped_bit_is_found_and_mended(both: tuple[Path, Path], pattern: str) -> None:
    source, to = both
    copy(source, to)
    below = "runs/main/a0001/step-00000001" if pattern != "attempt.json" else "runs/main/a0001"
    flip(to, f"{below}/{pattern}", -7)
    status, problems = checked(source, to, read=True)
    assert status == 12 and problems[0][0] == "damaged", problems
    copy(source, to, read=True)
    assert checked(source, to, read=True) == (0, [])
    assert loaded(to, step=1) == 1


def test_tampering_with_the_seal_put_right_is_found(both: tuple[Path, Path]) -> None:
    """Digests are no signatures: a manifest that was changed and sealed anew is found by comparing it."""
    from tenuto.model import canonical_json

    source, to = both
    copy(source, to)
    path = to / CheckpointId("main", 1, 1).manifest
    values = canonical_json.open_seal(path.read_bytes(), name="manifest")
    values.pop("digest", None)
    path.write_bytes(canonical_json.seal({**values, "metrics": {"loss": 0.0}}))
    status, problems = checked(source, to)
    assert status == 25 and problems == [("diverged", CheckpointId("main", 1, 1).manifest)]
    report = tenuto.Repository(source).replicate(to)
    assert isinstance(report.failed[0], CopyDiverged) and report.failed[0].exit_code == 25


def test_a_missing_object_is_found_and_brought_again(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    (to / PACK.format(1)).unlink()
    assert checked(source, to) == (12, [("missing", PACK.format(1))])
    assert steps(copy(source, to)) == [1]
    assert checked(source, to, read=True) == (0, [])


def test_a_source_that_was_set_back_and_went_on_differently(both: tuple[Path, Path], tmp_path: Path) -> None:
    source, to = both
    backup = tmp_path / "backup"
    shutil.copytree(source, backup)
    with tenuto.Checkpointer(source, {"w": np.zeros(200_000)}, save=tenuto.every(steps=1)) as ckpt:
        for _ in ckpt.steps(5):
            pass
    copy(source, to)
    shutil.rmtree(source)
    backup.rename(source)
    with tenuto.Checkpointer(source, {"w": np.ones(200_000)}, save=tenuto.every(steps=1)) as ckpt:
        for _ in ckpt.steps(9):
            pass
    status, problems = checked(source, to)
    assert status == 25 and ("diverged", "runs/main/a0002/attempt.json") in problems
    report = tenuto.Repository(source).replicate(to)
    assert report.copied == () and all(isinstance(error, CopyDiverged) for error in report.failed)


# -- what the source has removed --------------------------------------------------------------------------------------


def test_a_copy_keeps_what_the_source_removes_unless_asked(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    remove(source, 0)
    copy(source, to)
    assert loaded(to, step=0) == 0
    assert checked(source, to) == (0, [])
    assert [id.step for id in copy(source, to, prune=True).pruned] == [0]
    assert [id.step for id in tenuto.Repository(to).checkpoints()] == [2, 1]
    assert_whole(Repo.open(open_store(to)))


def test_pruning_never_takes_the_newest_whole_one(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    remove(source, 2)
    assert copy(source, to, prune=True).pruned == ()
    flip(to, "runs/main/a0001/step-00000002/rank-00000.index", -3)
    assert [id.step for id in copy(source, to, prune=True).pruned] == [], "ahead of what the source knows: it stays"
    assert loaded(to) == 1


def test_a_tag_keeps_what_it_names(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    shutil.rmtree((source / PACK.format(1)).parent)
    assert copy(source, to, prune=True).pruned == ()
    tenuto.Repository(source).untag("good")
    assert [id.step for id in copy(source, to, prune=True).pruned] == [1]


# -- promoting --------------------------------------------------------------------------------------------------------


def test_a_copy_is_no_primary_while_the_primary_answers(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    repo = Repo.open(open_store(to))
    with pytest.raises(RemovalRefused, match="answers"):
        copy_record.plan_promote(repo)
    flip(source, "tenuto*.json", -5)
    with pytest.raises(RemovalRefused, match="it is there, but"):
        copy_record.plan_promote(repo)
    with pytest.raises(UsageError, match="is a primary already"):
        save(source.with_name("another"), 1)
        copy_record.plan_promote(Repo.open(open_store(source.with_name("another"))))


def test_a_promoted_copy_is_trained_in(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    shutil.rmtree(source)
    repo = Repo.open(open_store(to))
    plan = copy_record.plan_promote(repo)
    assert plan.lost == str(source) and plan.newest == (CheckpointId("main", 1, 2),)
    copy_record.promote(repo)
    save(to, 7)
    assert loaded(to) == 7
    assert_whole(Repo.open(open_store(to)))


def test_the_source_knows_its_copies(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    copy(source, to)
    repo = Repo.open(open_store(source))
    assert [one.url for one in copy_record.registered_copies(repo)] == [str(to)]
    assert take_census(repo).foreign == []
    assert_whole(repo)


def test_a_source_that_cannot_be_written_is_copied_all_the_same(both: tuple[Path, Path]) -> None:
    source, to = both

    class ReadOnly(DelegatingStore):
        def put_if_absent(self, name: str, content: Content, *, token: str) -> Receipt:
            raise tenuto.errors.StoreDenied(f"{name}: read-only")

    report = tenuto.Repository(ReadOnly(open_store(source))).replicate(to)
    assert steps(report) == [2, 1, 0] and report.ok and report.unlisted


def test_a_dead_writers_leftover_goes_and_a_live_ones_stays(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    from tenuto.maintenance.copy_plan import token as token_of

    own = token_of()
    pid, started = own.split("-")[1:3]
    dead, live = own.replace(f"-{pid}-{started}-", f"-{pid}-{int(started) + 1}-"), own
    for token in (dead, live):
        (to / f"{PACK.format(1)}.tmp-{token}").write_bytes(b"half")
    plan = plan_copy(Repo.open(open_store(source)), open_store(to))
    assert plan.leftovers == (f"{PACK.format(1)}.tmp-{dead}",)
    execute(Repo.open(open_store(source)), open_store(to), plan)
    assert [path.name.endswith(live) for path in to.rglob("*.tmp-*")] == [True]


def test_a_copy_that_is_not_complete_is_not_damaged(tmp_path: Path) -> None:
    """Of the parent of a later attempt only some is copied: elsewhere that would be a lost manifest."""
    source, to = tmp_path / "source", tmp_path / "copy"
    save(source, 0, 1)
    with tenuto.Checkpointer(source, {"w": np.zeros(200_000)}, save=tenuto.every(steps=1)) as ckpt:
        for _ in ckpt.steps(3):
            pass
    copied: list[int] = []

    def cut() -> None:
        copied.append(1)
        if len(copied) == 3:
            raise KeyboardInterrupt

    with armed("packs copied, checkpoint not looked for again", cut), pytest.raises(KeyboardInterrupt):
        copy(source, to)
    repo = Repo.open(open_store(to))
    report = assert_whole(repo)
    assert [finding.message for finding in report.findings if "not all of it is copied" in finding.message]
    copy(source, to)
    assert not assert_whole(repo).findings


def test_a_place_holds_one_copy_on_the_list(both: tuple[Path, Path]) -> None:
    source, to = both
    copy(source, to)
    shutil.rmtree(to)
    copy(source, to)
    assert len(list(copy_record.registered_copies(Repo.open(open_store(source))))) == 1


def told_by_check(source: Path, to: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The status of `replicate --check`, and what it says."""
    with pytest.raises(SystemExit) as ended:
        main(["replicate", str(source), str(to), "--check"])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_a_copy_of_a_tag_that_was_moved_from_what_is_gone_is_whole_and_in_step(
    both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, to = both
    tenuto.Repository(source).tag("good", 2)
    remove(source, 1)
    copy(source, to)
    assert_whole(Repo.open(open_store(to)))
    assert loaded(to, step="good") == 2
    assert told_by_check(source, to, capsys)[0] == 0
    # What a version named that was left out of an earlier copy is brought as well.
    (to / "refs/tag/good/1.json").unlink()
    assert not verify(Repo.open(open_store(to)), plan_verify(Repo.open(open_store(to)))).ok
    copy(source, to)
    assert_whole(Repo.open(open_store(to)))


def test_a_check_names_what_its_status_is_for(both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, to = both
    copy(source, to)
    status, told = told_by_check(source, to, capsys)
    assert status == 0 and "in step" in told
    tenuto.Repository(source).tag("good", 2)
    status, told = told_by_check(source, to, capsys)
    assert status == BEHIND and "1 name behind" in told and "in step" not in told


def test_a_copy_of_a_deduped_run_has_what_its_checkpoints_need_and_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base lies in the trash of the copy for some of its own chunks: what it rests on itself was not copied."""
    source, to = tmp_path / "source", tmp_path / "copy"
    state = {"w": np.arange(20_000.0), "z": np.zeros(250_000)}
    with tenuto.Checkpointer(
        source, state, save=tenuto.every(steps=1), encoding="dedupe", keep=tenuto.keep.latest(1)
    ) as ckpt:
        for step in ckpt.steps(5):
            state["w"][step] = -1.0
            if step % 3 == 0:
                state["z"] += 1
    copy(source, to)
    found = verify(Repo.open(open_store(to)), plan_verify(Repo.open(open_store(to))))
    assert found.ok, found.findings
    assert any("only what others need" in finding.message for finding in found.findings), "of a base"
    assert told_by_check(source, to, capsys)[0] == 0
    flip(to, "runs/main/a0001/step-00000004/*.pack", -10)
    assert not verify(Repo.open(open_store(to)), plan_verify(Repo.open(open_store(to)))).ok, "damage is damage"


def test_a_tag_on_what_a_tier_does_not_get_is_no_damage_there(tmp_path: Path) -> None:
    home, tier = tmp_path / "home", tmp_path / "tier"
    for steps in 3, 5:
        tiers = tenuto.Tiers(tenuto.Tier(home), tenuto.Tier(tier, save=tenuto.every(steps=2)))
        with tenuto.Checkpointer(tiers, {"w": np.zeros(100)}, save=tenuto.every(steps=1)) as ckpt:
            ckpt.restore()
            for _ in ckpt.steps(steps):
                pass
        there = {int(path.parent.name[-8:]) for path in tier.glob("runs/main/a0001/*/manifest.json")}
        tenuto.Repository(home).tag("early", min({1, 2, 3} - there))
    assert (tier / "refs/tag/early/1.json").exists()
    assert_whole(Repo.open(open_store(tier)))
