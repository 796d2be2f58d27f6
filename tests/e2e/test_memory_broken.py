"""The memory tier when its own thread breaks off, when states change their form, and when an image lies."""

import errno
import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tenuto
from support import memory_training
from support.memory_training import Life, digest_of, live, right, sealed, shared_memory, state_of, untouched
from tenuto import every, on
from tenuto.engine.memory_tier.image_store import check_image, open_image
from tenuto.engine.memory_tier.listing import FoundImage, images
from tenuto.engine.memory_tier.seal import Seal, SealedObject, encode_seal
from tenuto.engine.staging import slots
from tenuto.errors import StateMismatch
from tenuto.events import AttemptClaimed, CandidateSkipped, Event
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")

EXPECTED = untouched()


@pytest.fixture
def where(tmp_path: Path, root: Path):
    yield tmp_path / "ckpts"
    if (tmp_path / "ckpts").exists():
        assert_whole(Repo.open(open_store(tmp_path / "ckpts")))


def unkept(life: Life) -> list[int]:
    return [int(text.split()[1]) for text in life.told("Warned") if " is not kept in memory: " in text]


# -- the thread that seals ---------------------------------------------------------------------------------------------


class Breaks:
    """One thing at a time that raises when it is called."""

    def __init__(self) -> None:
        self.armed: tuple[str, Exception] | None = None

    def around(self, owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def broken(*words, **more):
            if self.armed is not None and self.armed[0] == name:
                raise self.armed[1]
            return inner(*words, **more)

        setattr(owner, name, broken)

    def everywhere(self) -> None:
        from tenuto.concurrency.worker_threads import WorkerThreads
        from tenuto.engine.memory_tier.slot_file import LastingSlot
        from tenuto.engine.save import job
        from tenuto.engine.staging.capture import Capturer
        from tenuto.engine.staging.plan import Digester

        self.around(Capturer, "capture")
        self.around(WorkerThreads, "submit")
        self.around(Digester, "advance")
        self.around(job, "encode_index")
        self.around(LastingSlot, "describe")
        self.around(LastingSlot, "seal")


PARTS = ("capture", "submit", "advance", "encode_index", "describe", "seal")
ERRORS = (OSError(errno.ENOSPC, "no room"), RuntimeError("can't start new thread"), MemoryError())
WAYS = [(part, error) for part in PARTS for error in ERRORS]


def test_a_state_that_cannot_be_kept_is_told_and_later_ones_are(where: Path) -> None:
    """Every other step breaks off, each in another way; the one before stays whole meanwhile."""
    breaks = Breaks()
    broken = {2 * number + 2: way for number, way in enumerate(WAYS)}

    def on_step(ckpt, step, state):
        sealed(ckpt)
        breaks.armed = None
        if step >= 3:
            whole = max(one.footer.id.step for one in images() if one.footer is not None)
            assert whole == (step - 2 if step - 1 in broken else step - 1)
        breaks.armed = broken.get(step)

    options = {"on_step": on_step, "save": every(steps=50) | on.end()}
    first = live(where, kill=max(broken), before=breaks.everywhere, **options)
    assert first.killed
    assert unkept(first) == sorted(broken)
    last = live(where, steps=39)
    assert last.began == max(broken) - 1
    right(first, last)


@pytest.mark.parametrize("part", ["encode_index", "describe", "seal"])
def test_a_save_to_the_store_is_made_though_its_image_cannot_be_sealed(where: Path, part: str) -> None:
    breaks = Breaks()

    def on_step(ckpt, step, state):
        sealed(ckpt)
        if step > 10:
            assert ckpt._training.saving.saver.join(30)
        breaks.armed = (part, MemoryError()) if step in (10, 20) else None

    first = live(where, kill=13, on_step=on_step, before=breaks.everywhere)
    assert first.killed
    assert (unkept(first), first.told("SaveFailedEvent")) == ([10], [])
    assert first.told("Committed") == ["main/a0001/10"]
    last = live(where, steps=15)
    assert last.began == 13
    right(first, last)


# -- states that change their form -------------------------------------------------------------------------------------


def form(step: int) -> dict[str, np.ndarray]:
    """Leaves that a step has besides: up to forty, up to 240 kB each, or empty ones."""
    generator = np.random.default_rng(step)
    sizes = generator.integers(0, 60_000, int(generator.integers(0, 40))) * (step % 3 > 0)
    return {f"more.{number}": np.full(int(size), step, np.int32) for number, size in enumerate(sizes)}


def whole(where: Path) -> None:
    """Every byte of every image is what was sealed."""
    chunk_bytes = Repo.open(open_store(where)).chunk_bytes
    for found in images():
        with Path(found.slot.root, f"tenuto-{os.geteuid()}", found.name).open("rb") as file:
            image = open_image(file.fileno(), found.name, chunk_bytes=chunk_bytes, keys=None)
            assert image is not None
            check_image(image, image.repo.index(image.manifest(), 0))
            image.close()


def test_a_state_that_grows_shrinks_gains_and_loses_leaves(where: Path) -> None:
    """Each step has another form; a restart begins with that of the step that it goes on from."""

    def reform(ckpt, step, state):
        for name in [name for name in state["model"] if name.startswith("more.")]:
            del state["model"][name]
        state["model"].update(form(step))

    options = {"on_step": reform, "save": every(steps=7) | on.end()}
    lives = [live(where, kill=5, **options)]
    for kill in (9, 12, 17):
        before = max(lives[-1].digests)
        whole(where)

        def in_the_form_of(step: int = before) -> None:
            inner = memory_training.state_of

            def formed(*words):
                state = inner(*words)
                state["model"].update(form(step))
                return state

            memory_training.state_of = formed

        lives.append(live(where, kill=kill, before=in_the_form_of, **options))
        assert (lives[-1].killed, lives[-1].began) == (True, before)
    whole(where)
    right(*lives)


# -- images that lie ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """What a training left that was killed at step 17: step 10 in the store, 16 and 17 in memory."""
    place = tmp_path_factory.mktemp("crashed")
    with shared_memory() as root:

        def on_step(ckpt, step, state):
            if step == 11:
                assert ckpt._training.saving.saver.join(30)

        assert live(place / "ckpts", kill=17, on_step=on_step).killed
        shutil.copytree(root, place / "shm")
    (place / "ckpts").rename(place / "kept")  # each copy of it is then where it was moved to, and has its images
    return place


class Left:
    """A copy of it, to be spoilt and then looked at."""

    def __init__(self, crashed: Path, place: Path, root: Path) -> None:
        self.where = place / "ckpts"
        shutil.copytree(crashed / "kept", self.where)
        shutil.copytree(crashed / "shm", root, dirs_exist_ok=True)
        found = {one.footer.id.step: one for one in images() if one.footer is not None}
        assert sorted(found) == [16, 17]
        self.newest: FoundImage = found[17]
        self.path = root / f"tenuto-{os.geteuid()}" / self.newest.name
        self.events: list[Event] = []

    @property
    def footer(self) -> Seal:
        assert self.newest.footer is not None
        return self.newest.footer

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def restored(self, elements: int = memory_training.ELEMENTS) -> int:
        """The step that a process gets back; its state is that step's, bit for bit."""
        state = state_of(elements)
        with tenuto.Checkpointer(self.where, state, memory=every(steps=1), sinks=[self]) as ckpt:
            found = ckpt.restore()
        assert found is not None
        assert digest_of(state) == EXPECTED[found.step]
        assert found.source.startswith("from memory") == (found.step > 10)
        return found.step

    def passed_over(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, CandidateSkipped)]


@pytest.fixture
def left(crashed: Path, tmp_path: Path, root: Path) -> Left:
    return Left(crashed, tmp_path, root)


def test_what_is_whole_is_restored_as_often_as_one_likes(left: Left) -> None:
    assert [left.restored(), left.restored()] == [17, 17]
    assert left.passed_over() == []


LIES: dict[str, Callable[[Seal], Seal]] = {
    "a longer image": lambda footer: replace(footer, image=footer.image + (1 << 40)),
    "an image that is not a whole page": lambda footer: replace(footer, image=footer.image - 1),
    "a longer index": lambda footer: replace(footer, index=SealedObject(1 << 50, footer.index.digest)),
    "a longer manifest": lambda footer: replace(footer, manifest=SealedObject((1 << 53) - 1, footer.manifest.digest)),
    "all of the file": lambda footer: replace(footer, manifest=SealedObject(footer.manifest.length + 8192, bytes(16))),
    "no image": lambda footer: replace(footer, image=0),
    "another index": lambda footer: replace(footer, index=SealedObject(footer.index.length, bytes(16))),
    "another save": lambda footer: replace(footer, save_id="0" * 32),
    "another rank": lambda footer: replace(footer, rank=3, ranks=4),
    "a later step": lambda footer: replace(footer, id=replace(footer.id, step=30)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_seal_that_lies_with_a_right_digest_is_passed_over(left: Left, lie: str) -> None:
    with left.path.open("r+b") as file:
        slots.clear_seal(file.fileno())
        slots.write_seal(file.fileno(), 0, encode_seal(LIES[lie](left.footer), left.newest.name))
    assert left.restored() == 16, "the other slot has the step before"
    assert [reason.startswith("its image in memory: ") for reason in left.passed_over()] == [True]


@pytest.mark.parametrize("cut", ["the half", "to nothing", "with a hole", "one byte longer"])
def test_a_torn_file_is_passed_over(left: Left, cut: str) -> None:
    size = left.path.stat().st_size
    lengths = {"the half": size // 2, "to nothing": 0, "one byte longer": size + 1}
    if cut == "with a hole":
        seal = left.path.read_bytes()[-slots.ROOM :]
        os.truncate(left.path, left.footer.image // 2 // 4096 * 4096)
        os.truncate(left.path, size)
        with left.path.open("r+b") as file:
            file.seek(-slots.ROOM, os.SEEK_END)
            file.write(seal)
    else:
        os.truncate(left.path, lengths[cut])
    assert left.restored() == 16


def test_the_image_of_one_slot_is_none_of_another(left: Left) -> None:
    other = left.path.with_name({"0-0": "0-1", "0-1": "0-0"}[left.path.name])
    other.write_bytes(left.path.read_bytes())
    left.path.unlink()
    assert left.restored() == 10, "a copy under another name says of itself that it is one"


@pytest.mark.parametrize("what", ["a link", "a fifo", "a directory"])
def test_what_is_no_file_in_a_slots_place_is_told_at_most(left: Left, what: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(left.path.read_bytes())
    left.path.unlink()
    if what == "a link":
        left.path.symlink_to(target)
    elif what == "a fifo":
        os.mkfifo(left.path, 0o600)
    else:
        left.path.mkdir()
    before = target.read_bytes()
    assert [one.footer.id.step for one in images() if one.footer is not None] == [16]
    assert left.restored() == 16
    last = live(left.where, steps=19)
    assert (last.status, last.began) == (0, 16)
    right(last)
    assert target.read_bytes() == before


@pytest.mark.parametrize("elements", [60_000, 15_000, 3_000_000])
def test_a_restart_with_another_model_is_an_error_and_loses_no_image(left: Left, elements: int) -> None:
    """As it is with a checkpoint in the store: nothing is overwritten, nothing is claimed, and it can be put right."""
    with pytest.raises(StateMismatch, match="model"):
        left.restored(elements)
    assert not any(isinstance(event, AttemptClaimed) for event in left.events)
    assert left.restored() == 17


def test_a_place_whose_name_is_longer_than_a_seal_takes(tmp_path: Path, root: Path) -> None:
    """It is for the eye alone, and must not cost the image: control characters take six bytes each."""
    deep = tmp_path.joinpath(*["\x01" * 200] * 4)
    deep.mkdir(parents=True)
    assert live(deep / "ckpts", kill=4).killed
    assert [one.footer.where for one in images() if one.footer is not None] == ["", ""]
    last = live(deep / "ckpts", steps=5)
    assert (last.status, last.began) == (0, 4)


def test_where_all_that_is_in_memory_is_damaged_and_nothing_durable_a_start_is_a_fresh_one(where: Path, root: Path):
    """An image is read straight into the model: what is damaged must not be found out with half of it in place."""
    assert live(where, kill=7).killed
    for found in list(images()):
        path = Path(root, f"tenuto-{os.geteuid()}", found.name)
        assert found.footer is not None
        with path.open("r+b") as file:
            file.seek(found.footer.image // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x10]))

    said = where.parent / "said"

    def written_down() -> None:
        logging.getLogger("tenuto").addHandler(logging.FileHandler(said))

    last = live(where, before=written_down)
    assert "step 7 of run main is damaged and was passed over, as were 1 more, (" in said.read_text()
    assert (last.status, last.began, len(last.told("CandidateSkipped"))) == (0, 0, 2)
    right(last)


def test_a_forked_child_never_unmaps_what_lies_at_an_images_address_by_then(where: Path, root: Path):
    """A loader's worker, forked while an image is open: when it lets go of that, something else may lie there."""
    import ctypes
    import gc

    assert live(where, kill=7).killed
    found = next(one for one in images() if one.footer is not None)
    with Path(root, f"tenuto-{os.geteuid()}", found.name).open("rb") as file:
        opened = [open_image(file.fileno(), found.name, chunk_bytes=4 << 20, keys=None)]
        length = os.fstat(file.fileno()).st_size
    assert opened[0] is not None and opened[0]._mapping is not None
    address = np.frombuffer(opened[0]._mapping, np.uint8).ctypes.data

    def child() -> None:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        # readable and writable, private, anonymous, at this very address
        assert libc.mmap(address, length, 0x1 | 0x2, 0x02 | 0x20 | 0x10, -1, 0) == address
        foreign = (ctypes.c_uint8 * length).from_address(address)
        foreign[7] = 77
        opened.clear()
        gc.collect()
        assert foreign[7] == 77

    assert memory_training.fork(child) == 0
    image = opened.pop()
    assert image is not None
    image.close()
