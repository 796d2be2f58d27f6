"""The memory tier beside others: a second job on the node, another user, a child that outlives its trainer."""

import contextlib
import json
import os
import shutil
import signal
import sys
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tenuto
from support.memory_training import Life, Log, fork, fork_off, live, right, sealed, shared_memory, train
from support.scarce_memory import A_THIRD_USER, ANOTHER_USER, Beside, Gate, as_user, become, open_place
from tenuto import every
from tenuto.cli import main
from tenuto.engine.memory_tier.listing import dead_images, images
from tenuto.engine.staging.arena import free_shared_memory
from tenuto.errors import ForkedProcess
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")


@pytest.fixture
def where(tmp_path: Path, root: Path):
    yield tmp_path / "ckpts"
    if (tmp_path / "ckpts").exists():
        assert_whole(Repo.open(open_store(tmp_path / "ckpts")))


def off(life: Life) -> list[str]:
    return [text for text in life.told("Warned") if "states are not kept in memory" in text]


def seen() -> list[tuple[str, int, bool]]:
    """Name, step and whether its process lives, of every image of this user."""
    return [(one.name, one.footer.id.step if one.footer is not None else 0, one.alive) for one in images()]


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(left.value.code or 0)


def impatient() -> None:
    from tenuto.repo.ownership import claim

    claim.DYING_S = 0.2


# -- two jobs ----------------------------------------------------------------------------------------------------------


def test_a_second_job_on_the_same_run_is_refused_and_disturbs_nothing(where: Path) -> None:
    gate = Gate(6)

    def on_step(ckpt, step, state):
        gate(ckpt, step, state)
        if step == 9:
            sealed(ckpt)
            os.kill(os.getpid(), signal.SIGKILL)

    first = Beside(where, on_step=on_step)
    gate.reached()
    before = seen()
    assert [(step, alive) for _, step, alive in sorted(before, key=lambda one: one[1])] == [(4, True), (5, True)]
    second = live(where, before=impatient)
    assert (second.status, second.told("AttemptClaimed")) == (1, [])
    assert max(second.digests, default=0) == 0
    assert seen() == before
    gate.go()
    assert first.end().killed
    last = live(where)
    assert last.began == 8
    right(first.end(), last)


def test_one_that_takes_the_run_over_does_without_the_slots(where: Path) -> None:
    gate = Gate(6)
    first = Beside(where, on_step=gate)
    gate.reached()
    before = seen()
    second = live(where, steps=12, before=impatient, takeover=True)
    assert (second.status, second.began) == (0, 0)
    assert len(off(second)) == 1
    assert "another process holds the slot" in off(second)[0]
    assert seen() == before
    gate.go()
    assert first.end().status == 1, "it finds that the run is another's when it saves"
    last = live(where, steps=14)
    assert last.began == 12, "nothing of attempt 1 counts any more"
    right(first.end(), second, last)
    assert seen() == []


@pytest.mark.parametrize("same", ["repository", "run"])
def test_two_jobs_at_the_same_time(where: Path, tmp_path: Path, same: str) -> None:
    """Of one repository under two names, or of two repositories under one."""
    places = (where, where) if same == "repository" else (where, tmp_path / "other")
    runs = ("one", "two") if same == "repository" else ("main", "main")
    gate = Gate(6)
    first = Beside(places[0], run=runs[0], on_step=gate)
    gate.reached()
    before = seen()
    assert live(places[1], kill=9, run=runs[1]).killed
    assert [one for one in seen() if one in before] == before
    assert sorted(step for _, step, alive in seen() if not alive) == [8, 9]
    first.kill()
    one, two = live(places[0], run=runs[0]), live(places[1], run=runs[1])
    assert (one.began, two.began) == (5, 9)
    right(first.end(), one, two)


# -- two users ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def everybodys(tmp_path):
    """A directory where every user may write, and shared memory that is everybody's as /dev/shm is."""
    with shared_memory():  # so that everything is imported: another user may not be able to read where Python lies
        state = {"w": np.zeros(10)}
        with tenuto.Checkpointer(tmp_path / "first", state, memory=every(steps=1)) as ckpt:
            ckpt.restore()
            for _ in ckpt.steps(3):
                sealed(ckpt)
            command("ls", "--memory")
        tenuto.load(tmp_path / "first")
        command("memory", "clear", "--all", "--yes")
    with open_place() as place, shared_memory() as root:
        root.chmod(0o1777)
        yield place, root


def test_neither_of_two_users_sees_or_disturbs_the_others_images(everybodys, capfd) -> None:
    place, root = everybodys
    ours = place / "ours"

    def waits(ckpt, step, state):
        if step == 11:
            ckpt.wait()  # while a save is being written the steps beside it share one slot

    assert live(ours, kill=17, on_step=waits).killed
    theirs = place / "theirs"
    shutil.copytree(ours, theirs)
    for path in (theirs, *theirs.rglob("*")):
        if os.geteuid() == 0:
            os.chown(path, ANOTHER_USER, ANOTHER_USER)
    before = seen()
    assert sorted(step for _, step, _ in before) == [16, 17]

    def other() -> None:
        become(ANOTHER_USER)
        assert list(images()) == []
        assert dead_images() == []
        own = root / f"tenuto-{os.geteuid()}"
        for name in ("tenuto-0", *(str(Path("tenuto-0", one)) for one, _, _ in before)):
            with pytest.raises(PermissionError):
                os.listdir(root / name)
            with pytest.raises(PermissionError):
                (root / name / "x").open("rb")
        with pytest.raises(PermissionError):
            (root / "tenuto-0").rename(root / "gone")
        assert command("ls", "--memory") == 0
        assert command("memory", "clear", "--all", "--yes") == 0
        free_shared_memory()
        life = live(theirs, kill=13)
        assert (life.killed, life.began) == (True, 10), "a copy of the repository starts from its store"
        right(life)
        assert [found.footer.uid for found in images() if found.footer is not None] == [ANOTHER_USER] * 2
        assert own.is_dir()

    assert as_user_or_skip(other) == 0
    told = "".join(capfd.readouterr())
    assert "no images in this node's memory" in told
    assert "not shown: what 1 other user may have in memory; ask as that user, or root" in told
    assert "no dead process of yours has left an image in memory" in told
    assert seen() == before
    last = live(ours)
    assert last.began == 17
    right(last)
    assert len(list((root / f"tenuto-{ANOTHER_USER}").rglob("0-?"))) == 2, "root looks at its own images alone"


def as_user_or_skip(body) -> int:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    return fork(body)


def everything(root: Path) -> list[tuple[str, int, int]]:
    """Name, owner and time of change of all that lies there."""
    found = [(str(path), path.lstat()) for path in root.rglob("*")]
    return sorted((path, status.st_uid, status.st_mtime_ns) for path, status in found)


def shown(capfd, *words: str) -> list[tuple[int, int, str, int | None, str]]:
    """What `ls --memory` says of each image: its user, step, owner, the owner's process, and what becomes of it."""
    capfd.readouterr()
    assert command("ls", "--memory", *words, "--json") == 0
    return [
        (one["uid"], one["checkpoint"]["step"] if one["sealed"] else 0, one["owner"], one["pid"], one["state"])
        for one in json.loads(capfd.readouterr().out)["images"]
    ]


def test_root_sees_whose_images_there_are_and_changes_none(everybodys, capfd) -> None:
    place, root = everybodys
    theirs, gate = place / "theirs", Gate(6)

    def other() -> None:
        become(ANOTHER_USER)
        train(theirs, Log(place / "log"), 40, gate)

    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    pid = fork_off(other)
    try:
        gate.reached()
        before = everything(root)
        running = "its process is running"
        assert sorted(shown(capfd)) == [(ANOTHER_USER, step, "alive", pid, running) for step in (4, 5)]
        assert command("ls", "--memory") == 0
        assert str(pid) in capfd.readouterr().out
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    left = "for user 65533 to resume from, or to flush"
    expected = [(ANOTHER_USER, step, "dead", None, left) for step in (4, 5)]
    with mock.patch(
        "tenuto.cli.views.memory_images._reached", side_effect=AssertionError("a stranger's word was followed")
    ):
        assert sorted(shown(capfd)) == sorted(shown(capfd, str(theirs))) == expected
    assert shown(capfd, "--run", "another") == []
    assert list(images()) == [], "who goes on from memory looks at its own images alone"
    assert command("memory", "clear", "--all", "--yes") == 0
    told = capfd.readouterr().out.splitlines()
    assert told[0].startswith("left alone, of running processes or other users: 2 images, ")
    assert sum(f" {ANOTHER_USER} " in line and " dead " in line for line in told) == 2, told
    assert told[-1] == "no dead process of yours has left an image in memory"
    for words in (["--dry-run"], []):
        capfd.readouterr()
        assert command("flush", str(theirs), *words) == 18
        assert f"hint: run it as user {ANOTHER_USER}: tenuto flush {theirs} --run main\n" in capfd.readouterr().err
    assert [path.name for path in (theirs / "runs" / "main").iterdir()] == ["a0001"]
    assert everything(root) == before

    def again() -> None:
        become(ANOTHER_USER)
        assert command("flush", str(theirs)) == 0
        assert tenuto.load(theirs).step == 5

    assert fork(again) == 0


def test_what_another_user_has_laid_there_misleads_nobody(everybodys, capfd) -> None:
    """Links to root's own image, a fifo that would be waited for, and a seal that says it is somebody else's."""
    place, root = everybodys
    ours = place / "ours"
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    assert live(ours, kill=7).killed
    mine = sorted(images(), key=lambda one: one.footer.id.step if one.footer is not None else 0)
    newest = root / "tenuto-0" / mine[-1].name
    copied = newest.read_bytes()

    def attack() -> None:
        own = root / f"tenuto-{ANOTHER_USER}"
        parent = own / mine[-1].slot.parent
        for path in (own, parent.parent, parent):
            path.mkdir(mode=0o700)
        (parent / newest.name).write_bytes(copied)
        (parent / "0-7").symlink_to(newest)
        os.mkfifo(parent / "0-8")
        (parent / "0-9").mkdir()
        (own / "linked").symlink_to(root / "tenuto-0" / mine[-1].slot.parent.partition("/")[0])

    assert as_user(ANOTHER_USER, attack) == 0
    found = shown(capfd, str(ours))
    assert [(user, step) for user, step, *_ in sorted(found)] == [(0, 6), (0, 7), (ANOTHER_USER, 7)]
    assert [state for user, *_, state in found if user == 0] == ["a restart resumes from it"] * 2
    for one in mine:
        (root / "tenuto-0" / one.name).unlink()
    assert command("flush", str(ours)) == 18, "a copy is nothing that root would write"
    assert live(ours, 8).began == 0


def _a_directory(own: Path) -> None:
    own.mkdir(mode=0o700)


def _an_open_directory(own: Path) -> None:
    own.mkdir()
    own.chmod(0o777)


def _a_link_to_the_victims_own(own: Path) -> None:
    own.symlink_to(own.parent / "elsewhere")


def _a_link_to_nothing(own: Path) -> None:
    own.symlink_to(own.parent / "nothing")


def _a_file(own: Path) -> None:
    own.write_bytes(b"")


def _a_fifo(own: Path) -> None:
    os.mkfifo(own)


TRAPS = [_a_directory, _an_open_directory, _a_link_to_the_victims_own, _a_link_to_nothing, _a_file, _a_fifo]


def _goes_on_without(place: Path, root: Path, own: Path) -> None:
    """A training of this user whose place in shared memory is a trap."""
    life = live(place / "ckpts", steps=12)
    assert life.status == 0
    assert len(off(life)) == 1
    assert "shared memory cannot be used: " in off(life)[0]
    assert own.name in off(life)[0]
    right(life)
    assert tenuto.load(place / "ckpts").step == 12
    assert list(images()) == []
    assert command("ls", "--memory") == 0
    assert command("memory", "clear", "--all", "--yes") == 0
    assert list((root / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__.strip("_"))
def test_a_place_that_an_attacker_laid_is_refused_and_training_goes_on(everybodys, trap) -> None:
    place, root = everybodys
    own = root / f"tenuto-{A_THIRD_USER}"

    def attack() -> None:
        old = os.umask(0)
        trap(own)
        os.umask(old)

    assert as_user(ANOTHER_USER, attack) == 0

    def victim() -> None:
        become(A_THIRD_USER)
        (root / "elsewhere").mkdir(mode=0o700)
        _goes_on_without(place, root, own)

    assert fork(victim) == 0
    if own.is_dir() and not own.is_symlink():
        assert list(own.iterdir()) == []
    assert own.lstat().st_uid == ANOTHER_USER


@pytest.mark.parametrize("trap", TRAPS[1:], ids=lambda trap: trap.__name__.strip("_"))
def test_a_place_that_is_open_to_others_or_no_directory_is_refused(tmp_path: Path, root: Path, trap) -> None:
    """The same without another user to be."""
    own = root / f"tenuto-{os.geteuid()}"
    (root / "elsewhere").mkdir(mode=0o700)
    trap(own)
    _goes_on_without(tmp_path, root, own)


# -- forked children ---------------------------------------------------------------------------------------------------


def test_a_child_that_outlives_its_trainer_holds_nothing(where: Path) -> None:
    """As a loader's worker does after the trainer's SIGKILL, until it notices."""
    stays, goes = os.pipe(), os.pipe()

    def on_step(ckpt, step, state):
        if step == 4 and os.fork() == 0:
            with contextlib.suppress(BaseException):
                os.close(stays[0])
                os.close(goes[1])
                os.read(goes[0], 1)
            os._exit(0)

    assert live(where, kill=7, on_step=on_step).killed
    os.close(stays[1])
    assert [alive for _, _, alive in seen()] == [False, False]
    again = live(where, kill=13)
    assert again.began == 7
    os.close(goes[0])
    os.close(goes[1])
    assert os.read(stays[0], 1) == b"", "the child was there until now"
    os.close(stays[0])
    last = live(where)
    assert last.began == 13
    right(again, last)


def test_a_child_that_ends_well_leaves_the_parents_images(where: Path) -> None:
    """It is refused what its parent owns, leaves the Checkpointer's block, runs what is to run at the end."""

    def in_the_child(ckpt, state) -> None:
        for use in (ckpt.restore, ckpt.save, ckpt.wait, lambda: next(iter(ckpt.steps(50)))):
            with pytest.raises(ForkedProcess, match="forked child"):
                use()
        ckpt.close()
        ckpt.__exit__(None, None, None)
        ran = 0
        for last in list(weakref.finalize._registry):  # as at the end of the interpreter, but for the test's own
            found = last.peek()
            if found is not None and found[1].__module__.startswith("tenuto."):
                last()
                ran += 1
        assert ran >= 4, "two slots and two arenas"

    def on_step(ckpt, step, state):
        if step in (4, 5):
            if step == 5:
                sealed(ckpt)
            before = seen()
            assert fork(lambda: in_the_child(ckpt, state)) == 0
            if step == 5:
                assert seen() == before

    first = live(where, kill=7, on_step=on_step)
    assert first.killed
    last = live(where)
    assert last.began == 7
    right(first, last)


def test_a_child_trains_a_run_of_its_own_beside_its_parent(where: Path) -> None:
    """Slots of its own, whatever it inherited of the parent's."""

    def on_step(ckpt, step, state):
        if step == 5:
            sealed(ckpt)
            mine = {"w": np.zeros(1000)}

            def child() -> None:
                with tenuto.Checkpointer(where, mine, run="of-the-child", memory=every(steps=1)) as own:
                    for done in own.steps(10):
                        mine["w"] += 1
                        if done == 4:
                            sealed(own)
                            os.kill(os.getpid(), signal.SIGKILL)

            assert fork(child) == -signal.SIGKILL

    first = live(where, kill=7, on_step=on_step)
    assert first.killed
    assert sorted(step for _, step, _ in seen()) == [3, 4, 6, 7]
    last = live(where)
    assert last.began == 7
    right(first, last)


# -- what a session manager does ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["files", "everything"])
def test_shared_memory_that_is_cleared_under_a_training(where: Path, root: Path, what: str) -> None:
    """Begun anew where that is possible, else told once; a successor's images are not touched."""
    own = root / f"tenuto-{os.geteuid()}"

    def on_step(ckpt, step, state):
        if step == 6:
            sealed(ckpt)
            if what == "everything":
                shutil.rmtree(own)
            else:
                for path in own.rglob("0-*"):
                    path.unlink()

    first = live(where, kill=13, on_step=on_step)
    assert first.killed
    last = live(where)
    if what == "files":
        assert (off(first), last.began) == ([], 13)
    else:
        assert len(off(first)) == 1
        assert last.began == 10
    right(first, last)
