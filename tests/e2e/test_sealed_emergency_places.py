"""The emergency place of a sealed repository holds nothing that can be read without its keys, and nothing is taken over
from there that a holder of these has not put. Real processes; the store is full, or hangs, on command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tenuto
from support.emergency_training import KEPT_IN_MEMORY, LOOP, TRAIN, answers, place, ran, ranks_ran, untouched, weights
from support.supervised import finished
from support.troubled_store import variables
from tenuto.cli import main
from tenuto.errors import KeyMissing
from tenuto.maintenance.verify import assert_whole
from tenuto.model import canonical_json
from tenuto.repo.keys import unlock
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The repository `ckpts` is sealed, and `key` opens it."""
    found = {**os.environ, **variables(tmp_path), "TENUTO_KEY_FILE": str(tmp_path / "key")}
    tenuto.save({"a": 1}, tmp_path / "ckpts", run="first")
    command(tmp_path, found, "key", "add", "ckpts", "--key-file", "key")
    return found


def command(directory: Path, environment: dict[str, str], *words: str | Path) -> str:
    """Types a command, in this process. Returns what it prints."""
    printed = io.StringIO()
    with contextlib.chdir(directory), mock.patch.dict(os.environ, environment, clear=True):
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as end:
            main(list(map(str, words)))
    assert not end.value.code, printed.getvalue()
    return printed.getvalue()


def assert_hidden(tmp_path: Path, step: int, *, name: str = "other") -> None:
    """No file of the place has any part of what the parameters are at that step."""
    words = weights(step)
    pieces = [words[at : at + 16] for at in range(0, len(words), 800)]
    files = [file for file in (tmp_path / name).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) > len(words)
    for file in files:
        data = file.read_bytes()
        assert not [piece for piece in pieces if piece in data], file


def opened(where: Path, key: Path) -> Repo:
    repo = Repo.open(open_store(where))
    unlock(repo, key)
    return repo


@pytest.mark.parametrize("kind", ["full", pytest.param("hung", marks=pytest.mark.long)])
def test_what_lies_there_is_sealed_and_is_resumed_bit_for_bit(
    tmp_path: Path, environment: dict[str, str], kind: str
) -> None:
    expected = untouched()
    first = ran(tmp_path, LOOP, environment, status=143, KIND=kind)
    assert "step 8 of run main is saved in the emergency location" in first.stderr
    answers(tmp_path)
    assert_hidden(tmp_path, 8)
    loaded = tenuto.load(place(tmp_path), run="main", key=tmp_path / "key")
    assert loaded.state["w"].tobytes() == weights(8), "whoever can unlock the repository can unlock the place"
    with pytest.raises(KeyMissing):
        tenuto.load(place(tmp_path), run="main")
    assert_whole(Repo.open(open_store(place(tmp_path))))
    second = ran(tmp_path, LOOP, environment)
    assert f"took over step 8 of run main from the emergency location {place(tmp_path)}: main/a0002/8" in second.stderr
    assert second.stdout == expected
    repo = opened(tmp_path / "ckpts", tmp_path / "key")
    assert_whole(repo)
    manifest = repo.manifest(tenuto.open(tmp_path / "ckpts", run="main", key=tmp_path / "key").id)
    assert manifest.code
    assert not list(place(tmp_path).rglob("*.pack")) and "emergency" not in ran(tmp_path, LOOP, environment).stderr


def test_the_same_words_are_found_where_nothing_is_sealed(tmp_path: Path) -> None:
    """Or the test above would look for the wrong ones."""
    ran(tmp_path, LOOP, {**os.environ, **variables(tmp_path)}, status=143, KIND="full")
    with pytest.raises(AssertionError, match=r"rank-00000\.safetensors"):
        assert_hidden(tmp_path, 8)


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def rewritten(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """As somebody writes it who knows the format, and not the key."""
    found = canonical_json.open_seal(file.read_bytes(), name=file.name)
    del found["digest"]
    change(found)
    file.write_bytes(canonical_json.seal(found))


def forged(file: Path) -> None:
    rewritten(file, lambda found: found.update(metrics={"loss": 0.1}))


def unsealed(file: Path) -> None:
    rewritten(file, lambda found: found.pop("code"))


def of_another_key(file: Path) -> None:
    rewritten(file, lambda found: found.update(code="1:" + "0" * 64))


def test_what_was_changed_there_is_refused_by_name(tmp_path: Path, environment: dict[str, str]) -> None:
    ran(tmp_path, LOOP, environment, status=143, KIND="full")
    answers(tmp_path)
    kept = tmp_path / "kept"
    for name in ("ckpts", "other"):
        shutil.copytree(tmp_path / name, kept / name)
    for file, change, said in (
        ("manifest.json", forged, "manifest.json is not what a holder of the repository's key has put there"),
        ("manifest.json", of_another_key, "manifest.json is not what a holder of the repository's key has put there"),
        ("manifest.json", unsealed, "manifest.json is not sealed: no holder of the repository's key has put it"),
        ("rank-00000.pack", flipped, "rank-00000.pack"),
        ("rank-00000.index", flipped, "rank-00000.index"),
    ):
        for name in ("ckpts", "other"):
            shutil.rmtree(tmp_path / name)
            shutil.copytree(kept / name, tmp_path / name)
        (found,) = place(tmp_path).glob(f"runs/main/*/*/{file}")
        change(found)
        second = ran(tmp_path, LOOP, environment)
        left = rf"step 8 of run main in the emergency location \S+ is left alone: .*{re.escape(said)}"
        assert re.search(left, second.stderr), (change, second.stderr)
        assert "took over" not in second.stderr and "resumed" not in second.stderr
        assert " takes it" not in second.stderr
        assert second.stdout == untouched()
        assert found.exists()


def test_a_pack_that_was_cut_and_sealed_for_another_name_is_refused(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Two saves of one repository, both by its key: the data file of one does not pass for the other's."""
    ran(tmp_path, LOOP, environment, status=143, KIND="full")
    (found,) = place(tmp_path).glob("runs/main/*/*/rank-00000.pack")
    kept = found.read_bytes()
    shutil.rmtree(tmp_path / "other")
    answers(tmp_path)
    ran(tmp_path, LOOP.replace("step == 7", "step == 9"), environment, status=143, KIND="full")
    answers(tmp_path)
    (found,) = place(tmp_path).glob("runs/main/*/*/rank-00000.pack")
    assert len(kept) == found.stat().st_size
    found.write_bytes(kept)
    second = ran(tmp_path, LOOP, environment)
    assert "is left alone: it is damaged" in second.stderr and "took over" not in second.stderr


def test_keys_may_be_rotated_and_slots_removed_before_it_is_taken_over(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    expected = untouched()
    ran(tmp_path, LOOP, environment, status=143, KIND="full")
    answers(tmp_path)
    old = re.search(r"\w{8,}", command(tmp_path, environment, "key", "ls", "ckpts", "--json").split('"id"')[1])
    assert old
    command(tmp_path, environment, "key", "add", "ckpts", "--key-file", "new", "--with", "key")
    command(tmp_path, environment, "key", "rm", "ckpts", "--slot", old[0], "--yes")
    later = {**environment, "TENUTO_KEY_FILE": str(tmp_path / "new")}
    command(tmp_path, later, "key", "rotate", "ckpts", "--key-file", "new", "--yes")
    second = ran(tmp_path, LOOP, later)
    assert "took over step 8" in second.stderr and second.stdout == expected
    assert_whole(opened(tmp_path / "ckpts", tmp_path / "new"))
    rings = {
        where: sorted(file.name for file in (where / "keys").iterdir())
        for where in (tmp_path / "ckpts", place(tmp_path))
    }
    assert len({tuple(names) for names in rings.values()}) == 1 and len(rings[place(tmp_path)]) == 1, rings


def test_what_was_sealed_by_keys_that_were_destroyed_is_refused_by_name(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    ran(tmp_path, LOOP, environment, status=143, KIND="full")
    answers(tmp_path)
    slot = re.search(r"\w{8,}", command(tmp_path, environment, "key", "ls", "ckpts", "--json").split('"id"')[1])
    assert slot
    command(tmp_path, environment, "key", "rm", "ckpts", "--slot", slot[0], "--yes")
    command(tmp_path, environment, "key", "add", "ckpts", "--key-file", "new")
    second = ran(tmp_path, LOOP, {**environment, "TENUTO_KEY_FILE": str(tmp_path / "new")})
    said = "is left alone: it cannot be opened: .* needs key 1 of its repository, which is not on the key ring any more"
    assert re.search(said, second.stderr), second.stderr
    assert "took over" not in second.stderr and "resumed" not in second.stderr


def test_keys_that_the_repository_has_lost_are_not_removed_from_the_place(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    ran(tmp_path, LOOP, environment, status=143, KIND="full")
    answers(tmp_path)
    (ring,) = (place(tmp_path) / "keys").iterdir()
    shutil.rmtree(tmp_path / "ckpts" / "keys")
    plain = {**environment}
    del plain["TENUTO_KEY_FILE"]
    second = ran(tmp_path, LOOP, plain)
    assert "is none that" in second.stderr and "were keys lost there?" in second.stderr, second.stderr
    assert "took over" not in second.stderr and ring.exists()
    shutil.copytree(place(tmp_path) / "keys", tmp_path / "ckpts" / "keys")
    shutil.rmtree(tmp_path / "ckpts" / "runs" / "main")
    assert "cannot be used" not in ran(tmp_path, LOOP, environment).stderr


def test_what_training_has_left_behind_is_taken_by_the_command_that_is_named(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    ran(tmp_path, LOOP, environment, status=143, KIND="full")
    answers(tmp_path)
    (tmp_path / "other").rename(tmp_path / "unplugged")
    ran(tmp_path, LOOP, environment)
    shutil.rmtree(tmp_path / "other")
    (tmp_path / "unplugged").rename(tmp_path / "other")
    command(tmp_path, environment, "key", "rotate", "ckpts", "--key-file", "key", "--yes")
    later = ran(tmp_path, LOOP, environment)
    named = re.search(r"is left alone: (.*?); `tenuto (.*?)` takes it", later.stderr)
    assert named and "attempt 2 has gone further" in named[1], later.stderr
    command(tmp_path, environment, *named[2].replace("NEWRUN", "rescued").split())
    assert tenuto.load(tmp_path / "ckpts", run="rescued", key=tmp_path / "key").state["w"].tobytes() == weights(8)
    assert_whole(opened(tmp_path / "ckpts", tmp_path / "key"))


def test_a_kill_in_the_middle_of_taking_over_loses_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    expected = untouched()
    ran(tmp_path, LOOP, environment, status=143, KIND="full")
    answers(tmp_path)
    for point in ("save begun", "copies put, none visible", "emergency checkpoint taken over, still in its place"):
        script = LOOP.replace("with tenuto", f'with armed("{point}", lambda: os.kill(os.getpid(), 9)), tenuto')
        ran(tmp_path, script, environment, status=-9)
        assert_whole(opened(tmp_path / "ckpts", tmp_path / "key"))
    last = ran(tmp_path, LOOP, environment)
    assert last.stdout == expected and "resumed run main at step 8" in last.stderr
    assert not list(place(tmp_path).rglob("*.pack"))


@pytest.mark.parametrize("kind", ["full", pytest.param("hung", marks=pytest.mark.long)])
def test_ranks_that_share_a_place_save_there_together(tmp_path: Path, environment: dict[str, str], kind: str) -> None:
    first = ranks_ran(tmp_path, environment, KIND=kind, STEPS="1000000")
    saved = re.search(r"step (\d+) of run main is saved in the emergency location", first[0][2])
    assert saved, first
    answers(tmp_path)
    step = int(saved[1])
    assert_hidden(tmp_path, step)
    second = ranks_ran(tmp_path, environment, STEPS=str(step + 5))
    assert f"took over step {step} of run main" in second[0][2], second
    (tmp_path / "alone").mkdir()
    environment.pop("TENUTO_KEY_FILE")  # the repository that it makes has no keys
    untroubled = ranks_ran(tmp_path / "alone", environment, STEPS=str(step + 5))
    assert [out for _, out, _ in second] == [out for _, out, _ in untroubled]
    assert_whole(opened(tmp_path / "ckpts", tmp_path / "key"))


# -- a supervisor that gives up ----------------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")
KILLED = TRAIN + KEPT_IN_MEMORY.replace('raise ValueError("bad data")', "os.kill(os.getpid(), 9)").replace(
    "**more)", "save=more['save'])"
)


@linux
@pytest.mark.parametrize("kind", ["full", pytest.param("hung", marks=pytest.mark.long)])
def test_a_supervisor_that_gives_up_seals_what_it_puts_there(
    tmp_path: Path, environment: dict[str, str], kind: str
) -> None:
    words = ["--restarts", "0", "--emergency", str(tmp_path / "other")]
    first = finished(tmp_path, KILLED, *words, variables={**environment, "KIND": kind})
    assert f"saved from memory: main/a0001/7 in the emergency location {place(tmp_path)}" in first.stderr, first.stderr
    answers(tmp_path)
    assert_hidden(tmp_path, 7)
    command(tmp_path, environment, "memory", "clear", "ckpts", "--yes")
    second = finished(tmp_path, KILLED, *words[2:], variables=environment)
    assert "took over step 7" in second.stderr and second.stdout == untouched(), second.stderr


ANOTHER_RING = """
def at_the_place():
    import json
    from tenuto.repo.format import key_records, objects
    from tenuto.repo.keys import secret_from
    from tenuto.seal.keys import first_ring, new_slot
    (file,) = pathlib.Path("other").glob("*/keys/*")
    id = json.loads(file.read_bytes())["repository"]
    ring = first_ring(id, new_slot(id, secret_from("key"), "now"), frozenset())
    body = {**key_records.ring_body(ring, "now"), "id": "0" * 32}
    file.write_bytes(objects.encode("keys", f"keys/{file.name}", body, id))
"""
NO_RING = """
def at_the_place():
    import shutil
    shutil.rmtree(*pathlib.Path("other").glob("*/keys"))
"""


@linux
@pytest.mark.parametrize(
    ("at_the_place", "opens", "said"),
    [
        ("at_the_place = int", False, "no key was given that fits its slots"),
        (NO_RING, True, "the repository at .* has no keys"),
        (ANOTHER_RING, True, "is not what a holder of the repository's key has put there"),
    ],
    ids=["no key", "no ring", "another ring"],
)
def test_a_supervisor_writes_nothing_there_that_it_cannot_seal(
    tmp_path: Path, environment: dict[str, str], at_the_place: str, opens: bool, said: str
) -> None:
    """The supervisor has no key; or somebody who can write to the place takes the key ring away, or puts one there of
    his own which the supervisor's key opens, as that of a service that it asks may. The state stays in memory."""
    key = environment.pop("TENUTO_KEY_FILE")
    script = KILLED.replace("save=more", f"key={key!r}, save=more").replace("os.kill(", "at_the_place(); os.kill(")
    script = script.replace("with tenuto", f"{at_the_place}\nwith tenuto")
    words = ["--restarts", "0", "--emergency", str(tmp_path / "other")]
    given = {"TENUTO_KEY_FILE": key} if opens else {}
    first = finished(tmp_path, script, *words, variables={**environment, **given, "KIND": "hung"})
    assert re.search(said, first.stderr) and "saved from memory" not in first.stderr, first.stderr
    assert not list((tmp_path / "other").rglob("rank-*"))
    answers(tmp_path)
    images = json.loads(command(tmp_path, {**environment, **given}, "ls", "--memory", "--json"))["images"]
    (newest,) = [one for one in images if one["where"] == f"{tmp_path}/ckpts" and one["checkpoint"]["step"] == 7]
    assert newest["state"] == "a restart resumes from it", newest
    command(tmp_path, environment, "memory", "clear", "ckpts", "--yes")
