"""Whole directories that a stranger has prepared: links out of the repository, things that are no files, names that
would move a cursor. Nothing outside is read or written, nothing hangs, and every command ends."""

from __future__ import annotations

import gc
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import tenuto
from attacks.make_attacks import GOLDEN, INDEX, MANIFEST, PACK, STEP
from attacks.test_attacks import CONTROL, loads
from campaigns.fuzz.audit import recording
from tenuto.cli import main
from tenuto.errors import TenutoError

SECRET = "the secret of another user"


def link(name: str) -> Callable[[Path, Path], None]:
    def act(place: Path, secret: Path) -> None:
        (place / name).unlink()
        (place / name).symlink_to(secret)

    return act


def link_to_same(place: Path, secret: Path) -> None:
    """The pack's own bytes, outside: even these are not read through a link."""
    shutil.move(place / PACK, secret.with_name("pack"))
    (place / PACK).symlink_to(secret.with_name("pack"))


def link_directory(place: Path, secret: Path) -> None:
    outside = secret.with_name("step")
    shutil.move(place / STEP, outside)
    (place / STEP).symlink_to(outside, target_is_directory=True)


def link_run(place: Path, secret: Path) -> None:
    outside = secret.with_name("run")
    shutil.move(place / "runs/main", outside)
    (place / "runs/main").symlink_to(outside, target_is_directory=True)


def fifo(name: str) -> Callable[[Path, Path], None]:
    def act(place: Path, secret: Path) -> None:
        (place / name).unlink()
        os.mkfifo(place / name)

    return act


def directory(name: str) -> Callable[[Path, Path], None]:
    def act(place: Path, secret: Path) -> None:
        (place / name).unlink()
        (place / name).mkdir()

    return act


def sparse(name: str) -> Callable[[Path, Path], None]:
    """A terabyte of nothing."""

    def act(place: Path, secret: Path) -> None:
        os.truncate(place / name, 1 << 40)

    return act


def without_copy(act: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """`tenuto.json` is all that says what the repository is."""

    def both(place: Path, secret: Path) -> None:
        (place / "tenuto.copy.json").unlink()
        act(place, secret)

    return both


def hard_link(place: Path, secret: Path) -> None:
    (place / MANIFEST).unlink()
    os.link(secret, place / MANIFEST)


def names(place: Path, secret: Path) -> None:
    """Files, runs, attempts, tags and notes called so that a terminal would obey."""
    evil = "x\x1b[2J\x1b]0;owned\x07\n\u202ey"
    for parent in ("", "runs", "runs/main", "runs/main/a0002", STEP, "refs/tag", "trash", "tombstones"):
        (place / parent).mkdir(parents=True, exist_ok=True)
        (place / parent / evil).mkdir()
        (place / parent / f"{evil}.json").write_text(evil)
    (place / os.fsdecode(b"not-utf-8-\xff\xfe")).write_bytes(b"")


def device(place: Path, secret: Path) -> None:
    (place / MANIFEST).unlink()
    try:
        os.mknod(place / MANIFEST, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero: bytes without end
    except PermissionError:
        pytest.skip("only root makes devices")


PLACES: dict[str, tuple[Callable[[Path, Path], None], bool]] = {
    "pack is a link": (link(PACK), True),
    "pack is a link to its bytes": (link_to_same, True),
    "index is a link": (link(INDEX), True),
    "manifest is a link": (link(MANIFEST), True),
    "tenuto.json is a link": (without_copy(link("tenuto.json")), True),
    "attempt.json is a link": (link("runs/main/a0002/attempt.json"), False),
    "checkpoint is a link": (link_directory, True),
    "run is a link": (link_run, True),
    "pack is a pipe": (fifo(PACK), True),
    "index is a pipe": (fifo(INDEX), True),
    "manifest is a pipe": (fifo(MANIFEST), True),
    "tenuto.json is a pipe": (without_copy(fifo("tenuto.json")), True),
    "manifest is a device": (device, True),
    "pack is a directory": (directory(PACK), True),
    "manifest is a directory": (directory(MANIFEST), True),
    "pack of a terabyte": (sparse(PACK), True),
    "index of a terabyte": (sparse(INDEX), True),
    "manifest of a terabyte": (sparse(MANIFEST), True),
    "tenuto.json of a terabyte": (without_copy(sparse("tenuto.json")), True),
    "tenuto.json of a terabyte beside its copy": (sparse("tenuto.json"), False),
    "note of a terabyte": (sparse("runs/main/a0001/step-00000010/notes/1.json"), False),
    "manifest is another file": (hard_link, True),
    "names that move the cursor": (names, False),
}
"""What is done, and whether loading has to refuse."""


@pytest.mark.parametrize("name", PLACES)
def test_a_prepared_directory(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = Path(shutil.copytree(GOLDEN, tmp_path / "ckpts"))
    secret = tmp_path / "outside" / "secret"
    secret.parent.mkdir()
    secret.write_text(SECRET)
    act, refuses = PLACES[name]
    act(place, secret)
    refusal = loads(place)
    assert (refusal is not None) == refuses
    if refusal is not None:
        assert SECRET not in str(refusal)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    gc.collect()  # what earlier tests of this process left behind frees its shared memory now, and not while recorded
    for words in (["ls"], ["ls", "--json"], ["verify"], ["show", "--run", "main", "--step", "a0002/15"]):
        with recording(lambda event, arguments: True) as done, pytest.raises(SystemExit) as caught:
            main([words[0], str(place), *words[1:]])
        told = capfd.readouterr()
        assert done == []
        assert "Traceback" not in told.err
        assert SECRET not in told.out + told.err
        assert CONTROL.findall(told.out + told.err) == []
        assert isinstance(caught.value.code or 0, int)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert secret.read_text() == SECRET


@pytest.mark.parametrize("name", ["checkpoint is a link", "run is a link", "names that move the cursor"])
def test_saving_there_touches_nothing_outside(name: str, tmp_path: Path) -> None:
    place = Path(shutil.copytree(GOLDEN, tmp_path / "ckpts"))
    secret = tmp_path / "outside" / "secret"
    secret.parent.mkdir()
    secret.write_text(SECRET)
    PLACES[name][0](place, secret)
    outside = {path: path.lstat().st_mtime_ns for path in secret.parent.rglob("*")}
    try:
        tenuto.save({"a": 1}, place, run="main", step=99)
    except TenutoError as error:
        assert error.message
    assert {path: path.lstat().st_mtime_ns for path in secret.parent.rglob("*")} == outside
