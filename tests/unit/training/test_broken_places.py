"""Places that are not what they were: set back, promoted, swapped, unmounted, read late, full, or not the same for all
ranks. Nothing is lost by it, and nothing is silent."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support import loaded_interpreter
from support.broken_places import Refusing, damage, over
from support.rank_threads import together
from support.said import said
from tenuto.codec.chunk_map import ChunkRange
from tenuto.engine.read.chunk_reader import ChunkReader
from tenuto.engine.read.copy_packs import VerifiedContent
from tenuto.errors import CorruptionError, RanksDisagree, RepositoryError, SaveFailed, StoreFull, UsageError
from tenuto.maintenance import gc, remove, replicate, undelete
from tenuto.maintenance.verify import execute, plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.store.registry import open_store
from tenuto.training.saves import RunSaver

pytestmark = pytest.mark.filterwarnings("ignore")


def train(place: Any, steps: int, at: Any = None, **more: Any) -> None:
    arguments = {"save": tenuto.every(steps=1), "keep": tenuto.keep.latest(100), **more}
    with tenuto.Checkpointer(place, {"w": np.ones(3)}, **arguments) as ckpt:
        for _ in ckpt.steps(steps):
            if at is not None:
                at(ckpt)


def packs(place: Path) -> set[str]:
    return {"/".join(path.parts[-3:-1]) for path in place.rglob("*.safetensors")}


def files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


# -- a home that is set back, or another one ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["train", "gc"])
def test_i6_checkpoints_that_a_home_set_back_does_not_know_are_left_alone(tmp_path: Path, how: str) -> None:
    home, disk = tmp_path / "home", tmp_path / "disk"

    def backup(ckpt: Any) -> None:
        if ckpt.step == 2:
            ckpt.wait()
            shutil.copytree(home, tmp_path / "backup")

    train(tenuto.PerNode(disk, home=home), 6, backup)
    shutil.rmtree(home)
    (tmp_path / "backup").rename(home)
    before = packs(disk)
    assert "a0001/step-00000006" in before
    if how == "train":
        with said("Was the primary restored from a backup"):
            train(tenuto.PerNode(disk, home=home), 4)
    else:
        repo = Repo.open(open_store(home))
        plan = gc.plan_gc(repo, grace_s=0.0)
        gc.execute(repo, plan)
        assert "restored from a backup" in str(plan)
    assert before <= packs(disk)


def test_i2_nothing_of_another_line_of_training_is_touched_in_a_place(tmp_path: Path) -> None:
    """The home is set back to before a claim, and the next one gets its number: what lies under that in the place is
    another attempt's."""
    home, disk = tmp_path / "home", tmp_path / "disk"
    train(tenuto.PerNode(disk, home=home), 4)
    shutil.copytree(home, tmp_path / "backup")
    train(tenuto.PerNode(disk, home=home), 8)
    shutil.rmtree(home)
    (tmp_path / "backup").rename(home)
    before = files(disk)
    with pytest.raises(SaveFailed, match="another line of training"):
        train(tenuto.PerNode(disk, home=home), 10, on_error="raise")
    after = files(disk)
    assert {name: after.get(name) for name in before} == before


def test_a_place_that_was_made_the_home_is_no_mirror_of_the_old_one(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    train(tenuto.Mirror(a, b), 4)
    a.rename(tmp_path / "away")
    (b / "tenuto-member.json").unlink()
    train(b, 8)
    (tmp_path / "away").rename(a)
    before = files(b)
    with pytest.raises(RepositoryError, match="has checkpoints of its own"):
        train(tenuto.Mirror(a, b), 10)
    assert files(b) == before


# -- a place that is not the one it was --------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 2])
def test_a_disk_that_goes_away_in_the_middle_is_noticed_and_nothing_is_put_in_its_stead(
    tmp_path: Path, copies: int
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"

    def unmount(ckpt: Any) -> None:
        if ckpt.step == 2:
            ckpt.wait()
            b.rename(tmp_path / "disk")
            b.mkdir()

    with said(f"{b} is not the location that it was"):
        train(tenuto.Mirror(a, b, copies=copies), 4, unmount)
    assert not list(b.iterdir())
    steps = [id.step for id in tenuto.Repository(a).checkpoints()]
    assert steps == ([4, 3, 2, 1] if copies == 1 else [2, 1])


def test_one_directory_by_two_names_is_no_mirror(tmp_path: Path) -> None:
    class Aliased(LocalStore):
        """As a bind mount: the same files under another path."""

        @property
        def url(self) -> str:
            return "/another/name"

    place = tmp_path / "a"
    train(place, 2)
    with pytest.raises(UsageError, match="one directory by two names"):
        train(tenuto.Mirror(place, Aliased(str(place))), 4)
    train(place, 4)
    assert not (place / "tenuto-member.json").exists() and not list(place.glob("places/*"))


def test_ranks_of_a_mirror_have_the_same_places(tmp_path: Path) -> None:
    def work(ranks: Any) -> Any:
        other = tmp_path / ("b" if ranks.rank == 0 else "c")
        state = {"w": tenuto.per_rank(np.full(3, ranks.rank))}
        return tenuto.save(state, tenuto.Mirror(tmp_path / "a", other), ranks=ranks)

    found = together(2, work)
    assert all(isinstance(one, RanksDisagree) for one in found), found
    assert not packs(tmp_path / "c")


def test_what_retention_let_go_of_goes_from_a_node_that_was_left_for_an_older_step(tmp_path: Path) -> None:
    """The next attempt goes on from before what the node has: that is no home set back."""
    home = tmp_path / "home"
    train(tenuto.PerNode(tmp_path / "n1", home=home, node="n1", copies=2), 5)
    train(tenuto.PerNode(tmp_path / "n2", home=home, node="n2"), 6, resume_from=3, keep=tenuto.keep.latest(1))
    assert "a0001/step-00000005" in packs(tmp_path / "n1")
    repo = Repo.open(open_store(home))
    plan = gc.plan_gc(repo)
    assert "set back" not in str(plan)
    gc.execute(repo, plan)
    assert packs(tmp_path / "n1") == {"a0001/step-00000005"}, "the newest that was left behind, in the trash for a day"
    gc.execute(repo, gc.plan_gc(repo, grace_s=0.0))
    assert packs(tmp_path / "n1") == set() and packs(tmp_path / "n2") == {"a0002/step-00000006"}


def test_a_mirror_with_a_new_disk_is_filled_and_nothing_is_missed(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    train(tenuto.Mirror(a, b), 2)
    shutil.rmtree(b)
    with pytest.warns(Warning, match="is not the location that it was"):
        train(tenuto.Mirror(a, b), 4)
    assert not replicated(a).failed and packs(b) == packs(a)
    repo = Repo.open(open_store(a))
    assert not replicate.plan_replicate(repo, tenuto.Repository(a).checkpoints()).away
    for place in (a, b):
        next(place.rglob("step-00000003/*.safetensors")).unlink()
    repo = Repo.open(open_store(a))
    assert [id.step for id in execute(repo, plan_verify(repo)).damaged()] == [3]


def test_a_place_that_was_out_of_reach_at_the_start_is_asked_nothing_afterwards(tmp_path: Path) -> None:
    class Away(OperatingSystem):
        asked = 0

        def _refuse(self, path: str) -> Any:
            Away.asked += 1
            raise OSError(errno.ESTALE, "stale", path)

        status = open = create = listdir = mkdir = _refuse  # type: ignore[assignment]

    a, b, c = (tmp_path / name for name in "abc")
    asked: list[int] = []
    train(
        tenuto.Mirror(a, over(b, Away()), c, copies=2),
        4,
        lambda ckpt: asked.append(Away.asked),
        keep=tenuto.keep.latest(1),
    )
    assert asked[0] > 0 and len(set(asked)) == 1
    assert packs(a) == packs(c) == {"a0001/step-00000004"}


# -- reading -----------------------------------------------------------------------------------------------------------


class Unreadable(OperatingSystem):
    """No pack gives its bytes, but for the first of them."""

    def __init__(self) -> None:
        self.packs: set[int] = set()

    def open(self, path: str, *, direct: bool = False) -> int:
        found = super().open(path, direct=direct)
        (self.packs.add if path.endswith(".safetensors") else self.packs.discard)(found)
        return found

    def pread(self, descriptor: int, buffers: Any, offset: int, *, nowait: bool = False) -> int:
        if descriptor in self.packs and offset + sum(map(len, buffers)) > 1_000_000:
            raise OSError(errno.EIO, "bad sector")
        return super().pread(descriptor, buffers, offset, nowait=nowait)


@pytest.mark.parametrize("count", [1, 2])
def test_i3_an_unreadable_copy_is_read_from_another_by_several_ranks_too(tmp_path: Path, count: int) -> None:
    a, b = tmp_path / "a", tmp_path / "b"

    def state(number: float) -> dict[str, Any]:
        return {f"w{leaf}": np.full(100_000, number + leaf) for leaf in range(8)}

    for number in (1.0, 2.0):
        together(count, lambda ranks, number=number: tenuto.save(state(number), tenuto.Mirror(a, b), ranks=ranks))
    bad = over(b, Unreadable())

    def load(ranks: Any) -> Any:
        restored = tenuto.load(tenuto.Mirror(a, bad), into=state(0.0), ranks=ranks)
        return restored.step, float(restored.state["w7"][-1])

    assert list(together(count, load)) == [(1, 9.0)] * count


def test_i5_what_was_found_of_a_copy_says_nothing_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread has verified a chunk of a copy that another thread turns away meanwhile: the other copy's chunk is
    not thereby verified."""
    a, b = (f"memory://turned-{name}-{os.getpid()}" for name in "ab")
    tenuto.save({"one": np.arange(1000.0), "two": np.arange(1000.0)}, tenuto.Mirror(a, b))
    with tenuto.open(a) as opened:
        offset = {path: opened[path] for path in ("one", "two")}
        assert set(offset) == {"one", "two"}
    for place, leaf in ((a, "two"), (b, "one")):
        store: Any = open_store(place).inner  # type: ignore[attr-defined]
        name = next(name for name in store.place.objects if name.endswith(".safetensors"))
        data, when = store.place.objects[name]
        at = bytes(data).rindex(np.arange(1000.0).tobytes()[800:1600]) if leaf == "two" else None
        at = bytes(data).index(np.arange(1000.0).tobytes()[800:1600]) if at is None else at
        store.place.objects[name] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], when
    checked, turned = threading.Event(), threading.Event()
    original = ChunkReader.check

    def paused(self: ChunkReader, pack: str, chunk: ChunkRange, data: Any, path: str) -> None:
        original(self, pack, chunk, data, path)
        if threading.current_thread().name == "slow" and not checked.is_set():
            checked.set()
            assert turned.wait(60)

    monkeypatch.setattr(ChunkReader, "check", paused)
    with tenuto.open(a) as opened:
        slow = threading.Thread(target=lambda: opened["one"][:], name="slow")
        slow.start()
        assert checked.wait(60)
        assert np.array_equal(opened["two"][:], np.arange(1000.0))  # from b
        turned.set()
        slow.join(60)
        with pytest.raises(CorruptionError):
            opened["one"][:]


def test_a_missing_copy_is_read_from_another_and_said(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    tenuto.save({"w": np.ones(3)}, tenuto.Mirror(a, b))
    next(a.rglob("*.safetensors")).unlink()
    with said(f"is missing in {a}: read from {b}"):
        found = tenuto.load(a)
    assert np.array_equal(found.state["w"], np.ones(3))


class Late(OperatingSystem):
    """As a client of a network file system: a name that was absent stays so until its directory is listed."""

    def __init__(self) -> None:
        self.absent: set[str] = set()

    def _look(self, path: str, look: Any) -> Any:
        if path in self.absent:
            raise FileNotFoundError(errno.ENOENT, "remembered", path)
        try:
            return look()
        except FileNotFoundError:
            self.absent.add(path)
            raise

    def status(self, path: str) -> Any:
        return self._look(path, lambda: super(Late, self).status(path))

    def open(self, path: str, *, direct: bool = False) -> int:
        found: int = self._look(path, lambda: super(Late, self).open(path, direct=direct))
        return found

    def listdir(self, path: str) -> Any:
        self.absent = {one for one in self.absent if os.path.dirname(one) != path}
        return super().listdir(path)

    def link(self, source: str, target: str) -> None:
        self.absent.discard(target)
        super().link(source, target)

    def create(self, path: str) -> int:
        self.absent.discard(path)
        return super().create(path)

    def mkdir(self, path: str) -> None:
        self.absent.discard(path)
        super().mkdir(path)


def test_i3_what_was_handed_on_is_waited_for_where_the_home_shows_it_late(tmp_path: Path) -> None:
    nodes = ["n0", "n1"]

    def part(ranks: Any, number: float) -> dict[str, Any]:
        begin, end = (12 * rank // 2 for rank in (ranks.rank, ranks.rank + 1))
        return {"w": tenuto.shard(np.arange(12.0)[begin:end] * number, whole=(12,), offsets=(begin,))}

    def place(ranks: Any) -> Any:
        node = nodes[ranks.rank]
        return tenuto.PerNode(tmp_path / node, home=over(tmp_path / "home", Late()), node=node)

    together(2, lambda ranks: tenuto.save(part(ranks, 1.0), place(ranks), ranks=ranks))
    nodes.reverse()
    found = together(2, lambda ranks: tenuto.load(place(ranks), into=part(ranks, 0.0), ranks=ranks))
    assert [getattr(one, "step", one) for one in found] == [0, 0]


# -- saving ------------------------------------------------------------------------------------------------------------


ENDS = """
import sys
import numpy as np
import tenuto

ckpt = tenuto.Checkpointer(tenuto.Mirror(*sys.argv[1:]), {"w": np.ones(4_000_000), "step": 0}, in_flight=2)
ckpt.restore()
for _ in range(2):
    ckpt.step_done()
    ckpt.save()
"""


def test_what_is_in_flight_when_a_script_ends_is_committed(tmp_path: Path) -> None:
    """The interpreter starts no more pools of threads by then."""
    done = loaded_interpreter.run(["-c", ENDS, str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.returncode == 0, done.stderr
    for place in "ab":
        assert next(iter(tenuto.Repository(tmp_path / place).checkpoints())).step == 2


def test_packs_of_a_save_that_failed_on_one_rank_go_from_every_node(tmp_path: Path) -> None:
    """Its begin.json stays in the home until the next claim."""

    def work(ranks: Any) -> Any:
        home: Any = tmp_path / "home"
        if ranks.rank == 3:
            home = over(home, Refusing("step-00000002/rank-00003.index", "step-00000003/rank-00003.index"))
        node = f"n{ranks.rank // 2}"
        place = tenuto.PerNode(tmp_path / node, home=home, node=node)
        train(place, 8, ranks=ranks, keep=tenuto.keep.latest(1), ranks_timeout=60.0)

    for one in together(4, work):
        assert one is None
    for node in ("n0", "n1"):
        assert packs(tmp_path / node) == {"a0001/step-00000008"}


def test_a_rank_that_needs_room_on_its_node_makes_it_whoever_leads_there(tmp_path: Path) -> None:
    made: list[int] = []

    def work(ranks: Any) -> Any:
        place = tenuto.PerNode(tmp_path / "node", home=tmp_path / "home", node="n")
        with tenuto.Checkpointer(place, {"w": np.ones(3)}, ranks=ranks, save=tenuto.every(steps=1)) as ckpt:
            for step in ckpt.steps(3):
                if step == 2 and ranks.rank == 1:
                    ckpt.wait()
                    assert ckpt._training is not None
                    saving: RunSaver = ckpt._training.saving
                    assert not saving.group.leads  # type: ignore[union-attr]
                    left = tmp_path / "node" / CheckpointId("main", 1, 1).directory
                    made.append(len(list(left.rglob("*.safetensors"))))
                    shutil.rmtree(tmp_path / "home" / CheckpointId("main", 1, 1).directory, ignore_errors=True)
                    (left / "manifest.json").unlink(missing_ok=True)
                    saving._make_room()
                    made.append(len(list(left.rglob("*.safetensors"))))

    together(2, work)
    assert made == [2, 0]


def test_a_full_node_is_named_and_not_the_home(tmp_path: Path) -> None:
    class Full(LocalStore):
        def free_bytes(self) -> int:
            return 1 << 20

    place = tenuto.PerNode(Full(str(tmp_path / "node")), home=tmp_path / "home")
    with pytest.raises((StoreFull, SaveFailed), match=str(tmp_path / "node")):
        tenuto.save({"w": np.ones(3)}, place)


# -- what a person does ------------------------------------------------------------------------------------------------


def replicated(home: Path) -> replicate.ReplicateReport:
    repo = Repo.open(open_store(home))
    return replicate.execute(repo, replicate.plan_replicate(repo, tenuto.Repository(home).checkpoints()))


def test_i5_two_who_replicate_at_once_put_nothing_that_is_not_whole(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    tenuto.save({"w": np.arange(3_000_000.0)}, tenuto.Mirror(a, b))
    next(b.rglob("*.safetensors")).unlink()
    first, second = threading.Event(), threading.Event()
    original = VerifiedContent.pieces

    def paused(self: VerifiedContent) -> Any:
        for number, piece in enumerate(original(self)):
            if number == 1 and threading.current_thread().name == "slow":
                first.set()
                assert second.wait(60)
            yield piece

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerifiedContent, "pieces", paused)
        slow = threading.Thread(target=replicated, args=(a,), name="slow")
        slow.start()
        assert first.wait(60)
        assert replicated(a).bytes > 0
        second.set()
        slow.join(60)
    repo = Repo.open(open_store(b))
    assert execute(repo, plan_verify(repo)).ok


def test_replicate_takes_each_pack_from_whoever_has_it_whole_and_goes_on_past_what_fails(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    train(tenuto.Mirror(a, b, c), 4)
    for pack in c.rglob("*.safetensors"):
        pack.unlink()
    damage(next(a.rglob("step-00000002/*.safetensors")))
    for place in (a, b):
        damage(next(place.rglob("step-00000003/*.safetensors")))
    report = replicated(a)
    assert [("step-00000003" in error.message) for error in report.failed] == [True]
    assert packs(c) == {f"a0001/step-0000000{step}" for step in (1, 2, 4)}


def test_what_is_done_at_the_home_reaches_its_mirrors(tmp_path: Path) -> None:
    """A tag, and the manifest that undelete puts back; what a mirror missed while it was away comes by replicate."""
    a, b = tmp_path / "a", tmp_path / "b"
    train(tenuto.Mirror(a, b), 3)
    repo = Repo.open(open_store(a))
    remove.execute(repo, remove.plan_remove(repo, [CheckpointId("main", 1, 2)]))
    undelete.execute(repo, undelete.plan_undelete(repo, CheckpointId("main", 1, 2)))
    tenuto.Repository(a).tag("good", 2)
    b.rename(tmp_path / "away")
    tenuto.Repository(a).tag("better", 1)
    (tmp_path / "away").rename(b)
    assert set(tenuto.Repository(b).tags()) == {"good"}
    assert [id.step for id in tenuto.Repository(b).checkpoints()] == [3, 2, 1]
    replicated(a)
    assert tenuto.Repository(b).tags() == tenuto.Repository(a).tags()


def test_undelete_says_what_it_did_not_see(tmp_path: Path) -> None:
    home, disk = tmp_path / "home", tmp_path / "disk"
    train(tenuto.PerNode(disk, home=home, node="n"), 3)
    disk.rename(tmp_path / "away")
    repo, id = Repo.open(open_store(home)), CheckpointId("main", 1, 2)
    remove.execute(repo, remove.plan_remove(repo, [id]))
    assert undelete.execute(repo, undelete.plan_undelete(repo, id)).unseen == 1


def test_verify_names_a_mirror_that_is_not_there_and_damage_of_small_copies(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    train(tenuto.Mirror(a, b), 2)
    damage(next(b.rglob("step-00000001/*.index")))
    (b / CheckpointId("main", 1, 2).manifest).unlink()

    def verified() -> Any:
        repo = Repo.open(open_store(a))
        return execute(repo, plan_verify(repo))

    report = verified()
    assert not report.ok and not report.damaged()
    said = [finding.message for finding in report.findings]
    assert any("is not what it has to be" in one for one in said) and any("lacks 1 object" in one for one in said)
    b.rename(tmp_path / "away")
    assert any(f"{b} is not found from here" in finding.message for finding in verified().findings)
