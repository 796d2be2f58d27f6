"""Images in memory of a sealed repository: who has no key can read them, and neither change one nor make one.

Digests that are no secret do not show that: here somebody changes a weight, and makes every digest anew.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tenuto
from support import memory_ranks
from support.memory_ranks import Ends
from support.memory_training import Life, live, untouched
from tenuto import every, on
from tenuto.cli import main
from tenuto.codec.digest import digest
from tenuto.engine.memory_tier.image_store import open_image
from tenuto.engine.memory_tier.listing import images
from tenuto.engine.memory_tier.seal import Seal, SealedObject, encode_seal
from tenuto.engine.staging import slots
from tenuto.repo.format.index import encode_index
from tenuto.repo.format.manifest import encode_manifest
from tenuto.repo.repository import Repo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")
EXPECTED = untouched()
CHUNK = 256 << 10
RESEALS = "claimed, memory image not yet resealed"
SAVES: dict[str, Any] = {"save": every(steps=10) | on.end()}


@pytest.fixture
def where(tmp_path: Path, root: Path) -> Path:
    """A sealed repository."""
    tenuto.save({"x": np.zeros(1)}, tmp_path / "ckpts", run="other")
    command("key", "add", tmp_path / "ckpts", "--key-file", tmp_path / "key")
    return tmp_path / "ckpts"


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return int(caught.value.code or 0)


def trained(where: Path, **more: Any) -> Life:
    key = where.parent / "key"
    return live(where, **SAVES, **({"key": key} if key.exists() else {}), **more)


Change = Callable[[Repo, bytearray, Seal], Seal]


def rewritten(root: Path, change: Change, *, of: str = "") -> int:
    """Changes each image and its seal, as whoever may write to this memory can. Returns how many there were. `of`: only
    those of a rank."""
    done = 0
    for found in [one for one in images() if of in one.name]:
        with Path(root, f"tenuto-{os.geteuid()}", found.name).open("r+b") as file:
            image = open_image(file.fileno(), found.name, chunk_bytes=CHUNK, keys=None)
            if image is None:
                continue
            seal, data = image.footer, bytearray(os.pread(file.fileno(), image.footer.length, 0))
            changed = change(image.repo, data, seal)
            image.close()
            os.pwrite(file.fileno(), data, 0)
            slots.write_seal(file.fileno(), image.number, encode_seal(changed, found.name))
            done += 1
    return done


def another_weight(repo: Repo, data: bytearray, seal: Seal) -> Seal:
    """The first weight is 1000, and every digest is right."""
    manifest = repo.manifest(seal.id)
    index = repo.index(manifest, seal.rank)
    leaf = [spec.path for spec in index.specs].index("model/w")
    begin = int(index.offset[leaf])
    assert seal.index.length and len(index.packs) == 1
    data[begin : begin + 4] = np.float32(1000).tobytes()
    digests = index.digests.copy()
    chunk = bytes(data[begin : begin + int(index.length[leaf])])
    assert len(chunk) < CHUNK
    digests[int(index.chunk_start[leaf])] = np.frombuffer(digest(chunk), np.uint8)
    rows = encode_index(replace(index, digests=digests), seal.id, seal.repository)
    told = replace(manifest.indexes[0], digest=digest(rows))
    described = encode_manifest(replace(manifest, indexes=(told,)), seal.repository)
    assert (len(rows), len(described)) == (seal.index.length, seal.manifest.length)
    data[seal.image :] = rows + described
    return replace(
        seal,
        index=SealedObject(len(rows), digest(rows)),
        manifest=SealedObject(len(described), digest(described)),
    )


def without_code(repo: Repo, data: bytearray, seal: Seal) -> Seal:
    return replace(another_weight(repo, data, seal), code="", keyed="")


def a_code_of_another_image(repo: Repo, data: bytearray, seal: Seal) -> Seal:
    digits = seal.code.partition(":")[2]
    return replace(seal, code=f"1:{digits[:-1]}{'0' if digits[-1] != '0' else '1'}")


def not_hexadecimal(repo: Repo, data: bytearray, seal: Seal) -> Seal:
    return replace(seal, code="1:zz")


def of_a_key_that_is_not_there(repo: Repo, data: bytearray, seal: Seal) -> Seal:
    return replace(seal, code=f"7{seal.code[1:]}")


def signed_by_a_key_that_is_not_there(repo: Repo, data: bytearray, seal: Seal) -> Seal:
    return replace(seal, signed=f"7{seal.signed[1:]}")


def of_another_boot(repo: Repo, data: bytearray, seal: Seal) -> Seal:
    """As one would bring an image of another machine, or of yesterday."""
    return replace(seal, saved_us=seal.saved_us + 1)


def after_all_others(repo: Repo, data: bytearray, seal: Seal) -> Seal:
    return replace(seal, sequence=1 << 52)


CHANGES: list[Change] = [
    another_weight,
    without_code,
    a_code_of_another_image,
    not_hexadecimal,
    of_a_key_that_is_not_there,
    signed_by_a_key_that_is_not_there,
    of_another_boot,
    after_all_others,
]
REFUSED = "not what a holder of the repository's key has put there|has no code by a key|needs key 7"


def first_weight(where: Path, step: int, **more: Any) -> float:
    return float(tenuto.load(where, step=step, **more).state["model"]["w"][0])


def test_it_is_resumed_from_bit_for_bit(where: Path) -> None:
    first = trained(where, kill=27)
    second = trained(where)
    assert first.killed and second.status == 0 and second.source.startswith("from memory") and second.began == 27
    assert {step: one for step, one in (first.digests | second.digests).items() if one != EXPECTED[step]} == {}


def test_it_is_gone_on_from_once_more_by_who_has_not_come_further(where: Path) -> None:
    """Each process seals the image that it goes on from as its own, without reading it again."""
    assert trained(where, kill=27).killed
    for point in (RESEALS, "memory image captured, not sealed"):
        between = trained(where, at=point)
        assert between.killed and between.began == 27
    last = trained(where)
    assert (last.status, last.began) == (0, 27) and last.source.startswith("from memory")
    assert {step: one for step, one in last.digests.items() if one != EXPECTED[step]} == {}


def test_ranks_pass_over_a_state_that_was_altered_on_one_of_them(where: Path, root: Path) -> None:
    key = where.parent / "key"
    first = memory_ranks.live(where, 2, ends={1: Ends(step=17, settled=True)}, key=key)
    assert all(one.killed for one in first)
    assert [one.began for one in memory_ranks.live(where, 2, ends={0: Ends(at=RESEALS)}, key=key)] == [17, 17]
    assert rewritten(root, of_another_boot, of="1of2")
    last = memory_ranks.live(where, 2, key=key)
    assert [(one.status, one.began) for one in last] == [(0, 10)] * 2
    assert [one for one in last[1].told("CandidateSkipped") if re.search(REFUSED, one)]
    wanted = memory_ranks.untouched(2)
    for rank, one in enumerate(last):
        assert {step: digest for step, digest in one.digests.items() if digest != wanted[rank][step]} == {}


@pytest.mark.parametrize("altered", [False, True])
def test_another_number_of_ranks_gathers_what_nobody_has_altered(where: Path, root: Path, altered: bool) -> None:
    key = where.parent / "key"
    assert all(one.killed for one in memory_ranks.live(where, 3, ends={1: Ends(step=17, settled=True)}, key=key))
    if altered:
        assert rewritten(root, of_another_boot, of="1of3") == 2
    last = memory_ranks.live(where, 2, key=key)
    began = {one.began for one in last}
    assert [one.status for one in last] == [0, 0] and began <= ({10} if altered else {16, 17})
    if altered:
        said = [one for one in last[0].told("Warned") if "is passed over" in one]
        assert re.search(REFUSED, " ".join(said))
        return
    (step,) = began
    table = tenuto.load(where, step=step, key=key).state["table"]
    (found,) = where.glob(f"runs/main/a0002/step-*{step}")
    assert table.any() and not any(table[:1].tobytes() in file.read_bytes() for file in found.iterdir())


def test_a_key_that_was_rotated_since_opens_it(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained(where, kill=27).killed
    monkeypatch.setenv("TENUTO_KEY_FILE", str(where.parent / "key"))
    assert command("key", "rotate", where, "--yes") == 0
    assert trained(where).began == 27


def test_without_keys_such_a_change_is_not_seen(tmp_path: Path, root: Path) -> None:
    """Or the tests below would show nothing."""
    where = tmp_path / "ckpts"
    assert trained(where, kill=27).killed and rewritten(root, another_weight)
    second = trained(where, steps=28)
    assert (second.status, second.began) == (0, 27) and second.source.startswith("from memory")
    assert abs(first_weight(where, 28) - 1000) < 10


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_what_was_changed_without_the_key_is_passed_over(where: Path, root: Path, change: Change) -> None:
    first = trained(where, kill=27)
    assert first.killed and rewritten(root, change)
    second = trained(where)
    assert (second.status, second.began) == (0, 20) and "memory" not in second.source
    assert [one for one in second.told("CandidateSkipped") if re.search(REFUSED, one)]
    assert {step: one for step, one in second.digests.items() if one != EXPECTED[step]} == {}


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_it_is_not_flushed_either(
    where: Path, root: Path, change: Change, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(where, kill=27).killed and rewritten(root, change)
    monkeypatch.setenv("TENUTO_KEY_FILE", str(where.parent / "key"))
    assert command("flush", where) != 0
    assert re.search(REFUSED, capsys.readouterr().err)
    assert tenuto.load(where).checkpoint.step == 20


def test_an_old_image_is_no_other_attempts(where: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A genuine one of a line that was left behind, in the name of the attempt that has gone on elsewhere."""
    assert trained(where, kill=37).killed
    path = next(Path(root, f"tenuto-{os.geteuid()}", one.name) for one in images() if one.footer.id.step == 37)
    name, old = next((one.name, one.footer) for one in images() if one.footer.id.step == 37)
    kept = path.read_bytes()
    monkeypatch.setenv("TENUTO_KEY_FILE", str(where.parent / "key"))
    assert command("rollback", where, "20", "--run", "main") == 0
    assert trained(where, kill=22).began == 20
    holder = next(one.footer.holder for one in images() if one.footer is not None)
    path.write_bytes(kept)
    with path.open("r+b") as file:
        slots.write_seal(file.fileno(), 0, encode_seal(replace(old, holder=holder, sequence=1000), name))
        slots.write_seal(file.fileno(), 1, encode_seal(replace(old, holder=holder, sequence=1000), name))
    last = trained(where)
    assert (last.status, last.skipped) == (0, [37]) and 20 <= last.began <= 22
    assert {step: one for step, one in last.digests.items() if one != EXPECTED[step]} == {}


def test_what_was_in_memory_before_the_first_key_is_passed_over_and_told_so(tmp_path: Path, root: Path) -> None:
    where = tmp_path / "ckpts"
    assert trained(where, kill=27).killed
    assert command("key", "add", where, "--key-file", tmp_path / "key") == 0
    second = trained(where)
    assert (second.status, second.began) == (0, 20)
    assert [one for one in second.told("CandidateSkipped") if "it was made before there was one" in one]
