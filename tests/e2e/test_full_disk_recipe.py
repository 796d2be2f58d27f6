"""The recipe for a full disk, followed to the letter: training fails, three commands are typed, training goes on."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import tenuto
from tenuto.cli import main
from tenuto.errors import StoreFull
from tenuto.store.contract import Content
from tenuto.store.local.store import LocalStore

STATE_BYTES = 2_000_000
TRAIN = f"""
import sys

import numpy as np

import tenuto
from tenuto import every, keep

state = {{"weights": np.zeros({STATE_BYTES // 8})}}
with tenuto.Checkpointer("checkpoints", state, save=every(steps=1), keep=keep.all(), on_error="raise") as ckpt:
    for step in ckpt.steps(int(sys.argv[1])):
        state["weights"] += 1
"""
RECIPE = (
    ("ls", "checkpoints"),
    ("rm", "checkpoints", "a0001/1", "a0001/2", "--yes"),
    ("gc", "checkpoints", "--now", "--yes"),
)


def follow(steps: str) -> str:
    """A shell script: the disk fills up, even to its last byte once the trash is full; then the recipe is followed."""
    tenuto_command = f"{sys.executable} -c 'from tenuto.cli import main; main()'"
    rm, gc = (" ".join([tenuto_command, *words]) for words in RECIPE[1:])
    train = f"{sys.executable} train.py"
    return "\n".join(
        [
            "mount -t tmpfs -o size=12m tmpfs disk && cp train.py disk && cd disk || { echo no mount; exit 0; }",
            f"{train} {steps} && echo the disk did not fill up",
            f"{rm} || exit 1",
            "dd if=/dev/zero of=junk bs=4096 2>/dev/null",
            f"{gc} || exit 2",
            "rm junk",
            f"{train} {steps} && echo the disk did not fill up again",
            f"{tenuto_command} ls checkpoints || exit 3",
        ]
    )


def test_the_recipe_frees_at_once_on_a_real_file_system_without_a_byte(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare: a file system cannot be mounted for this test alone")
    (tmp_path / "disk").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["unshare", "-m", "sh", "-c", follow("20")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    if done.stdout == "no mount\n" or "unshare" in done.stderr.partition("\n")[0]:
        pytest.skip("no file system may be mounted here")
    assert done.returncode == 0, done.stderr
    assert "did not fill up" not in done.stdout
    assert re.search(r"^2 checkpoints removed, 3\.8\d MiB in the trash$", done.stdout, re.M)
    freed = re.search(
        r"^2 saves deleted, 3\.8\d MiB freed \(3\.8\d MiB free there now, 0 B before\)$", done.stdout, re.M
    )
    assert freed, done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  a000")]
    there = [(row[0], int(row[1])) for row in rows if row[-1] != "aborted"]
    # Two have gone, and two more were saved by the attempt that resumed.
    (newest, *_), filled = there, max(step for attempt, step in there if attempt == "a0001")
    assert newest == ("a0002", filled + 2)
    assert there == [*(("a0002", filled + n) for n in (2, 1)), *(("a0001", step) for step in range(filled, 2, -1))]
    assert "tenuto gc" in done.stderr and "--now` frees what is in the trash at once" in done.stderr


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that holds 12 MiB, as under a quota: what exceeds it is refused, before the first byte."""
    put = LocalStore.put_if_absent

    def size(path: Path) -> int:
        try:
            status = path.stat()
        except FileNotFoundError:  # another thread has put it in its place, or removed it, since it was listed
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def free() -> int:
        return (12 << 20) - sum(map(size, (tmp_path / "checkpoints").rglob("*")))

    def put_if_absent(self: LocalStore, name: str, content: Content, *, token: str) -> object:
        if content.length > free():
            raise StoreFull(f"no space for {name}", subject=name)
        return put(self, name, content, token=token)

    monkeypatch.setattr(LocalStore, "put_if_absent", put_if_absent)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: free())


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    assert not left.value.code


def test_the_recipe_frees_at_once_under_a_quota(
    quota: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def train() -> int:
        """Trains until no save fits any more; returns the newest step that was saved."""
        state = {"weights": np.zeros(STATE_BYTES // 8)}
        save, keep = tenuto.every(steps=1), tenuto.keep.all()
        ckpt = tenuto.Checkpointer("checkpoints", state, save=save, keep=keep, on_error="raise")
        with pytest.raises(tenuto.errors.SaveFailed), warnings.catch_warnings(), ckpt:
            warnings.simplefilter("ignore")  # that the loop was left
            for _ in ckpt.steps(20):
                state["weights"] += 1
        ckpt._training.saving.exit_status.clear()  # type: ignore[union-attr]  # this process goes on
        return tenuto.load("checkpoints").step

    filled = train()
    assert train() == filled  # the disk is full
    capsys.readouterr()
    for words in RECIPE:
        command(*words)
    out = capsys.readouterr().out
    assert re.search(r"^2 saves deleted, 3\.8\d MiB freed \(", out, re.M)
    assert train() == filled + 2
    assert tenuto.load("checkpoints", step=3).step == 3
