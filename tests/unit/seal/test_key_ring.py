"""The key ring of a repository: slots, rotation, removal, and what a process finds by itself."""

from __future__ import annotations

import base64
import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tenuto.errors import CorruptionError, KeyMissing, Tampered, UsageError, WrongKey
from tenuto.model import canonical_json
from tenuto.repo import keys
from tenuto.repo.format import key_records, objects
from tenuto.repo.keys import change_ring, find_key, ring_of
from tenuto.repo.repository import Repo
from tenuto.seal.cipher import Identity, open_chunk
from tenuto.seal.keys import KeyRing, RepositoryKeys, first_ring, new_slot, open_ring, rotated, with_slot, without_slot
from tenuto.seal.secret_sources import Cost, Passphrase, RawKey, Secret, from_file, from_variable, make_file
from tenuto.store.contract import Bytes
from tenuto.store.memory import MemoryStore

CHEAP = Cost(n=1 << 4, r=1, p=1)
NAMED = Identity("a" * 32, "b" * 32, "rank-00000.index")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (keys.KEY_FILE, keys.KEY_TEXT, keys.PASSPHRASE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def repo() -> Repo:
    return Repo.create_or_open(MemoryStore(secrets.token_hex(8)))


def raw(words: str = "a key") -> RawKey:
    return RawKey(secrets.token_bytes(32), words)


def passphrase(text: str = "correct horse") -> Passphrase:
    return Passphrase(text, cost=CHEAP)


def begin(repo: Repo, secret: Secret) -> KeyRing:
    slot = new_slot(repo.id, secret, "now")
    return change_ring(repo, lambda ring: first_ring(repo.id, slot, frozenset()))


def add(repo: Repo, opens: Secret, secret: Secret) -> KeyRing:
    slot = new_slot(repo.id, secret, "now")
    return change_ring(repo, lambda ring: with_slot(some(ring), open_ring(some(ring), [opens]), slot))


def some(ring: KeyRing | None) -> KeyRing:
    assert ring is not None
    return ring


def stored(repo: Repo) -> bytes:
    """Everything that the store has."""
    return b"".join(repo.store.get(entry.name, limit=1 << 30) for entry in repo.store.walk(""))


# -- slots -------------------------------------------------------------------------------------------------------------


def test_each_slot_opens_the_same_key(repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_file(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    begin(repo, file)
    text = base64.b64encode(secrets.token_bytes(32)).decode()
    monkeypatch.setenv("MY_KEY", text)
    add(repo, file, from_variable("MY_KEY"))
    ring = add(repo, file, passphrase("zwölf Boxkämpfer"))
    assert [slot.lock.kind for slot in ring.slots] == ["file", "environment", "passphrase"]
    opened = [
        open_ring(ring_of(repo), [one])
        for one in (from_file(tmp_path / "key"), from_variable("MY_KEY"), passphrase("zwo\u0308lf Boxka\u0308mpfer"))
    ]
    assert len({one.newest for one in opened}) == 1
    assert [entry.name for entry in repo.store.walk("keys")] == ["keys/3.json"], "older rings open with what is gone"


def test_a_wrong_secret_and_none_are_told_apart(repo: Repo) -> None:
    right = passphrase()
    ring = begin(repo, right)
    with pytest.raises(WrongKey, match="the passphrase opens none of the slots") as caught:
        open_ring(ring, [passphrase("battery staple")])
    assert "battery" not in str(caught.value) and caught.value.subject == repo.id
    with pytest.raises(KeyMissing, match="no key was given that fits"):
        open_ring(ring, [raw()])
    with pytest.raises(KeyMissing, match="TENUTO_PASSPHRASE"):
        find_key(repo)
    assert open_ring(ring, [raw(), passphrase("battery staple"), right]).number == 1


def test_a_repository_without_keys_says_so(repo: Repo) -> None:
    with pytest.raises(KeyMissing, match="has no keys") as caught:
        find_key(repo)
    assert "tenuto key add" in str(caught.value.hint)


def test_short_passphrases_and_open_files_are_refused(repo: Repo, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 8 characters") as short:
        begin(repo, passphrase("secret1"))
    assert "secret1" not in str(short.value)
    place = tmp_path / "key"
    make_file(place)
    with pytest.raises(UsageError, match="is there already"):
        make_file(place)
    place.chmod(0o640)
    with pytest.raises(UsageError, match="others than its owner") as caught:
        from_file(place)
    assert str(caught.value.hint).startswith("chmod 600")
    place.chmod(0o600)
    for wrong in (b"", b"x" * 31, b"x" * 33):
        place.write_bytes(wrong)
        with pytest.raises(UsageError, match="exactly 32 bytes"):
            from_file(place)
    with pytest.raises(KeyMissing, match="there is no key file"):
        from_file(tmp_path / "other")


# -- finding -----------------------------------------------------------------------------------------------------------


def test_the_environment_opens_it(repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_file(tmp_path / "key")
    begin(repo, file)
    monkeypatch.setenv("MINE", base64.b64encode(secrets.token_bytes(32)).decode())
    add(repo, file, from_variable("MINE"))
    add(repo, file, passphrase())
    newest = open_ring(ring_of(repo), [file]).newest
    assert find_key(repo).newest == newest, "a slot names the variable"
    monkeypatch.delenv("MINE")
    with pytest.raises(KeyMissing):
        find_key(repo)
    for name, value in (
        (keys.KEY_FILE, str(tmp_path / "key")),
        (keys.KEY_TEXT, base64.b64encode(file.key).decode()),
        (keys.PASSPHRASE, "correct horse"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert find_key(repo).newest == newest, name
    given: list[object] = [tmp_path / "key", str(tmp_path / "key"), lambda: file.key, lambda: "correct horse"]
    assert all(find_key(repo, one).newest == newest for one in given)  # type: ignore[arg-type]
    monkeypatch.setenv("OTHER_NAME", base64.b64encode(file.key).decode())
    assert find_key(repo, "env:OTHER_NAME").newest == newest


def test_what_was_given_counts_alone(repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(repo, make_file(tmp_path / "key"))
    monkeypatch.setenv(keys.KEY_FILE, str(tmp_path / "key"))
    other = make_file(tmp_path / "other")
    with pytest.raises(WrongKey, match=r"the key file .*other opens none"):
        find_key(repo, tmp_path / "other")
    with pytest.raises(KeyMissing, match="NOWHERE is not set"):
        find_key(repo, "env:NOWHERE")
    for wrong in (b"short", "", None, 7):
        with pytest.raises(UsageError, match="neither 32 bytes nor a passphrase"):
            find_key(repo, lambda wrong=wrong: wrong)  # type: ignore[misc]
    monkeypatch.setenv("MALFORMED", other.key.hex()[:40])
    with pytest.raises(UsageError, match="not 32 bytes in base64") as caught:
        find_key(repo, "env:MALFORMED")
    assert other.key.hex()[:40] not in str(caught.value)


# -- rotation and removal ----------------------------------------------------------------------------------------------


def test_rotation_leaves_everything_readable(repo: Repo) -> None:
    one, two = raw(), passphrase()
    begin(repo, one)
    add(repo, one, two)
    packs = []
    for number in range(1, 5):
        found = open_ring(ring_of(repo), [two])
        assert found.number == number
        packs.append((found.new_pack(NAMED), b"%d" % number))
        change_ring(repo, lambda ring: rotated(some(ring), [one, two]))
    assert len({slot.id for slot in ring_of(repo).slots}) == 2
    for secret in (one, two):
        found = open_ring(ring_of(repo), [secret])
        for sealer, data in packs:
            place, frame = sealer.seal(data)
            assert open_chunk(found.open_pack(sealer.wrapped, NAMED), frame, place) == data
        assert len({found.key(number, "x") for number in range(1, 6)}) == 5


def test_rotation_needs_the_secret_of_each_slot(repo: Repo) -> None:
    one, two = raw(), passphrase()
    begin(repo, one)
    ring = add(repo, one, two)
    with pytest.raises(WrongKey, match=rf"no secret was given for 1 slot: {ring.slots[1].id[:8]} \(passphrase\)"):
        rotated(ring, [one])
    assert repo.read_ring()[1] == ring


def test_a_removed_slot_is_locked_out_of_what_is_sealed_after_a_rotation(repo: Repo) -> None:
    stays, goes = raw(), raw()
    begin(repo, stays)
    ring = add(repo, stays, goes)
    kept = open_ring(ring, [goes])  # whoever had the slot may have kept what it opens
    old = kept.new_pack(NAMED).wrapped
    change_ring(repo, lambda ring: without_slot(some(ring), some(ring).slots[1].id))
    with pytest.raises(WrongKey):
        open_ring(ring_of(repo), [goes])
    change_ring(repo, lambda ring: rotated(some(ring), [stays]))
    with pytest.raises(WrongKey):
        open_ring(ring_of(repo), [goes])
    now = open_ring(ring_of(repo), [stays])
    new = now.new_pack(NAMED).wrapped
    now.open_pack(old, NAMED)
    with pytest.raises(KeyMissing):
        kept.open_pack(new, NAMED)
    with pytest.raises(Tampered):
        RepositoryKeys(repo.id, 2, {2: kept.newest}).open_pack(new, NAMED)


def test_a_slot_of_a_ring_before_a_rotation_opens_nothing_in_the_next(repo: Repo) -> None:
    """Somebody who can write to the store puts a removed slot back."""
    stays, goes = raw(), raw()
    begin(repo, stays)
    before = add(repo, stays, goes)
    after = rotated(without_slot(before, before.slots[1].id), [stays])
    with pytest.raises(WrongKey):
        open_ring(replace(after, slots=(*after.slots, before.slots[1])), [goes])


def test_removing_the_last_slot_destroys_the_keys(repo: Repo) -> None:
    one = raw()
    ring = begin(repo, one)
    change_ring(repo, lambda ring: rotated(some(ring), [one]))
    change_ring(repo, lambda now: without_slot(some(now), ring.slots[0].id))
    with pytest.raises(KeyMissing, match="were destroyed"):
        find_key(repo, lambda: one.key)
    assert ring.slots[0].wrapped.hex().encode() not in stored(repo)
    left = some(repo.read_ring()[1])
    assert (left.slots, left.older, left.key) == ((), {}, 2)
    slot = new_slot(repo.id, one, "now")
    again = change_ring(repo, lambda ring: first_ring(repo.id, slot, frozenset(), ring))
    assert again.key == 3, "a number is never given to another key"


# -- two processes, and crashes ----------------------------------------------------------------------------------------


def test_of_changes_at_once_none_is_lost(repo: Repo) -> None:
    one = raw()
    begin(repo, one)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            add(Repo.open(MemoryStore(repo.store.name)), one, raw())  # type: ignore[attr-defined]
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    ring = ring_of(repo)
    assert len(ring.slots) == 7 == len({slot.id for slot in ring.slots})
    assert [entry.name for entry in repo.store.walk("keys")] == ["keys/7.json"]


def test_a_ring_put_into_a_number_that_is_free_again_does_not_count(repo: Repo) -> None:
    """A process has read ring 1, and then was stopped for so long that rings 2 and 3 came, and 2 went."""
    one = raw()
    begin(repo, one)
    late = new_slot(repo.id, raw(), "late")
    calls = 0

    def change(ring: KeyRing | None) -> KeyRing:
        nonlocal calls
        calls += 1
        if calls == 1:
            add(repo, one, raw())
            add(repo, one, raw())
        return with_slot(some(ring), open_ring(some(ring), [one]), late)

    ring = change_ring(repo, change)
    assert (calls, len(ring.slots), ring_of(repo)) == (2, 4, ring)
    assert [entry.name for entry in repo.store.walk("keys")] == ["keys/4.json"]


def test_a_crash_between_two_rings_leaves_the_new_one_and_the_next_change_removes_the_old(repo: Repo) -> None:
    one = raw()
    begin(repo, one)
    first = repo.store.get("keys/1.json", limit=1 << 20)
    ring = add(repo, one, raw())
    repo.store.put_if_absent("keys/1.json", Bytes(first), token="x")  # as a crash before its removal leaves it
    assert ring_of(repo) == ring
    change_ring(repo, lambda ring: rotated(without_slot(some(ring), some(ring).slots[1].id), [one]))
    assert [entry.name for entry in repo.store.walk("keys")] == ["keys/3.json"]


# -- hostile rings -----------------------------------------------------------------------------------------------------


def put_ring(repo: Repo, change: Callable[[dict], object]) -> None:
    """Puts the newest ring again, changed and with a seal of its own, as somebody who can write to the store does."""
    number = repo.read_ring()[0]
    name = f"keys/{number}.json"
    values = json.loads(repo.store.get(name, limit=1 << 20))
    del values["digest"]
    change(values)
    repo.store.delete([name])
    repo.store.put_if_absent(name, Bytes(canonical_json.seal(values)), token="x")


@pytest.mark.parametrize(
    "change",
    [
        lambda ring: ring["slots"][0].update(cost=[1 << 40, 8, 1]),
        lambda ring: ring["slots"][0].update(cost=[1 << 20, 64, 1]),
        lambda ring: ring["slots"][0].update(cost=[1 << 17, 8, 1 << 30]),
        lambda ring: ring["slots"][0].update(cost=[(1 << 17) - 1, 8, 1]),
        lambda ring: ring["slots"][0].update(cost=[0, 0, 0]),
        lambda ring: ring["slots"][0].update(cost=[True, 8, 1]),
        lambda ring: ring["slots"][0].update(cost=[1, 2]),
        lambda ring: ring["slots"][0].update(cost=None),
        lambda ring: ring["slots"][0].update(kind="file"),
        lambda ring: ring["slots"][0].update(kind="door"),
        lambda ring: ring["slots"][0].update(data="a" * 100_000),
        lambda ring: ring["slots"][0].update(data="abc"),
        lambda ring: ring["slots"][0].update(name="a" * 100_000),
        lambda ring: ring["slots"][0].update(wrapped="ab"),
        lambda ring: ring["slots"][0].update(wrapped="ab" * 100_000),
        lambda ring: ring["slots"][0].update(id="../../x"),
        lambda ring: ring["slots"].extend(ring["slots"] * 100),
        lambda ring: ring["slots"].append("slot"),
        lambda ring: ring.update(slots={}),
        lambda ring: ring.update(key=0),
        lambda ring: ring.update(key=1 << 50),
        lambda ring: ring["older"].update({"1": "ab"}),
        lambda ring: ring["older"].update({"7": "ab" * 80}),
        lambda ring: ring["older"].update({"01": "ab" * 80}),
        lambda ring: ring["older"].update({"9" * 5000: "ab" * 80}),
        lambda ring: ring["older"].update({str(number): "ab" * 80 for number in range(5000)}),
        lambda ring: ring.update(repository="f" * 32),
        lambda ring: ring.update(kind="ref"),
        lambda ring: ring.update(path="keys/99.json"),
    ],
)
def test_a_hostile_ring_is_refused_before_anything_is_tried(
    repo: Repo, change: Callable[[dict], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = passphrase()
    begin(repo, secret)
    change_ring(repo, lambda ring: rotated(some(ring), [secret]))
    put_ring(repo, change)
    monkeypatch.setattr("hashlib.scrypt", lambda *_, **__: pytest.fail("it was tried"))
    with pytest.raises(CorruptionError, match=r"keys/2\.json"):
        find_key(repo, lambda: "correct horse")


@pytest.mark.parametrize(
    "change",
    [
        lambda ring: ring["slots"][0].update(cost=[1 << 5, 1, 1]),
        lambda ring: ring["slots"][0].update(name="x"),
        lambda ring: ring["slots"][0].update(id="e" * 32),
        lambda ring: ring["slots"][0].update(data="00" * 16),
        lambda ring: ring["slots"][0].update(wrapped="00" + ring["slots"][0]["wrapped"][2:]),
        lambda ring: ring.update(key=3),
    ],
)
def test_every_altered_part_of_a_slot_keeps_it_from_opening(repo: Repo, change: Callable[[dict], object]) -> None:
    secret = passphrase()
    begin(repo, secret)
    change_ring(repo, lambda ring: rotated(some(ring), [secret]))
    put_ring(repo, change)
    with pytest.raises(WrongKey):
        find_key(repo, lambda: "correct horse")


def test_altered_older_keys_are_refused(repo: Repo) -> None:
    one = raw()
    begin(repo, one)
    for _ in range(2):
        change_ring(repo, lambda ring: rotated(some(ring), [one]))

    def swap(ring: dict) -> None:
        ring["older"]["1"], ring["older"]["2"] = ring["older"]["2"], ring["older"]["1"]

    put_ring(repo, swap)
    with pytest.raises(Tampered, match="key 1 of repository"):
        find_key(repo, lambda: one.key)


def test_every_flipped_byte_of_a_ring_is_noticed(repo: Repo) -> None:
    one = raw()
    begin(repo, one)
    data = repo.store.get("keys/1.json", limit=1 << 20)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(CorruptionError):
            key_records.decode_ring("keys/1.json", bytes(changed), repo.id)


def test_a_ring_of_another_repository_is_refused(repo: Repo) -> None:
    one = raw()
    begin(repo, one)
    other = Repo.create_or_open(MemoryStore(secrets.token_hex(8)))
    data = repo.store.get("keys/1.json", limit=1 << 20)
    other.store.put_if_absent("keys/1.json", Bytes(data), token="x")
    with pytest.raises(CorruptionError, match="belongs to repository"):
        find_key(other, lambda: one.key)
    # Also with a seal that says otherwise: the repository is bound into the slot.
    values = json.loads(data)
    body = {name: values[name] for name in ("created", "id", "key", "older", "slots")}
    other.store.delete(["keys/1.json"])
    sealed = objects.encode("keys", "keys/1.json", body, other.id)
    other.store.put_if_absent("keys/1.json", Bytes(sealed), token="x")
    with pytest.raises(WrongKey):
        find_key(other, lambda: one.key)


# -- secrecy -----------------------------------------------------------------------------------------------------------


def test_nothing_secret_is_stored_or_shown(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    text = base64.b64encode(secrets.token_bytes(32)).decode()
    monkeypatch.setenv("MY_KEY", text)
    one, two, three = raw(), from_variable("MY_KEY"), passphrase("a most unlikely passphrase")
    begin(repo, one)
    add(repo, one, two)
    add(repo, one, three)
    change_ring(repo, lambda ring: rotated(some(ring), [one, two, three]))
    opened = open_ring(ring_of(repo), [three])
    slot_keys = [three.slot_key(slot.lock, repo.id) for slot in ring_of(repo).slots if slot.lock.kind == "passphrase"]
    known = [one.key, two.key, *slot_keys, opened.key(1, "x"), opened.key(2, "x"), three.text.encode()]
    shown = f"{one!r} {two!r} {three!r} {opened!r} {ring_of(repo)!r} {new_slot(repo.id, one, 'now')!r}".encode()
    with pytest.raises(WrongKey) as wrong:
        open_ring(ring_of(repo), [passphrase("not the one at all")])
    shown += f"{wrong.value!r} {wrong.value} {wrong.value.__cause__!r} {wrong.value.__context__!r}".encode()
    for secret in known:
        for spelled in (secret, secret.hex().encode(), base64.b64encode(secret), repr(secret).encode()):
            assert spelled not in stored(repo)
            assert spelled not in shown
