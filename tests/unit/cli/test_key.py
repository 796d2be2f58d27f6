import base64
import getpass
import io
import json
import secrets
import shutil
import subprocess

import numpy as np
import pytest

import tenuto
from support.rank_threads import together
from tenuto.errors import TenutoError
from tenuto.maintenance.copy_elsewhere import execute
from tenuto.maintenance.copy_plan import plan_copy
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.keys import find_key, ring_of
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("TENUTO_KEY_FILE", "TENUTO_KEY", "TENUTO_PASSPHRASE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def terminal(monkeypatch):
    """Answers on a terminal: passphrases, and yes to every question."""
    answers = []
    stdin = io.StringIO("y\n" * 10)
    stdin.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", stdin)
    monkeypatch.setattr(getpass, "getpass", lambda prompt: answers.pop(0))
    return answers


def slots(place):
    return [slot.id for slot in ring_of(Repo.open(open_store(place))).slots]


def opened(place, given=None):
    return find_key(Repo.open(open_store(place)), given)


def test_a_key_file_is_made_and_opens_the_repository(cli, place, tmp_path):
    assert "has no keys" in cli("key", "ls", place)[1]
    status, out, err = cli("key", "add", place, "--key-file", tmp_path / "key")
    assert (status, "(a key file) opens" in out) == (0, True)
    assert "is new: keep a copy of it" in err and "the only slot" in err
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert opened(place, tmp_path / "key").number == 1
    found = json.loads(cli("key", "ls", place, "--json")[1])
    assert (found["key"], [slot["kind"] for slot in found["slots"]]) == (1, ["file"])


def test_a_second_slot_needs_what_opens_the_first(cli, place, tmp_path, monkeypatch):
    cli("key", "add", place, "--key-file", tmp_path / "one")
    status, _, err = cli("key", "add", place, "--key-file", tmp_path / "two")
    assert (status, "no key was given" in err, (tmp_path / "two").exists()) == (26, True, False)
    (tmp_path / "wrong").write_bytes(secrets.token_bytes(32))
    (tmp_path / "wrong").chmod(0o600)
    status, _, err = cli("key", "add", place, "--key-file", tmp_path / "two", "--with", tmp_path / "wrong")
    assert (status, "opens none of the slots" in " ".join(err.split()), (tmp_path / "two").exists()) == (
        26,
        True,
        False,
    )
    assert cli("key", "add", place, "--key-file", tmp_path / "two", "--with", tmp_path / "one")[0] == 0
    monkeypatch.setenv("TENUTO_KEY_FILE", str(tmp_path / "two"))
    monkeypatch.setenv("MINE", base64.b64encode(secrets.token_bytes(32)).decode())
    assert cli("key", "add", place, "--env", "MINE")[0] == 0
    assert opened(place, tmp_path / "one").newest == opened(place, "env:MINE").newest


def test_passphrases_are_asked_for_and_never_typed_into_a_command(cli, place, terminal, tmp_path):
    terminal += ["correct horse battery", "correct horse batterz"]
    status, _, err = cli("key", "add", place, "--passphrase")
    assert (status, "not alike" in err) == (2, True)
    terminal += ["correct horse battery"] * 2
    assert cli("key", "add", place, "--passphrase")[0] == 0
    terminal += ["correct horse battery"]  # of the slot that there is
    assert cli("key", "add", place, "--key-file", tmp_path / "key")[0] == 0
    terminal += ["something else!"]
    assert cli("key", "add", place, "--key-file", tmp_path / "key2")[0] == 26
    assert "battery" not in "".join(path.read_text() for path in (place / "keys").iterdir())
    terminal += ["correct horse battery"]
    assert cli("key", "rotate", place, "--key-file", tmp_path / "key")[0] == 0
    assert opened(place, lambda: "correct horse battery").number == opened(place, tmp_path / "key").number == 2


def test_without_a_terminal_no_passphrase_is_waited_for(cli, place):
    status, _, err = cli("key", "add", place, "--passphrase")
    assert (status, "no terminal" in err, "TENUTO_PASSPHRASE" in err) == (2, True, True)


def test_rotate_names_the_slots_whose_secret_is_missing(cli, place, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    cli("key", "add", place, "--key-file", one)
    cli("key", "add", place, "--key-file", two, "--with", one)
    status, _, err = cli("key", "rotate", place, "--key-file", one, "--yes")
    assert (status, f"{slots(place)[1][:8]} (file)" in err) == (26, True)
    assert cli("key", "rotate", place, "--key-file", one, "--key-file", two)[0] == 2, "nobody has agreed"
    assert opened(place, one).number == 1
    status, out, err = cli("key", "rotate", place, "--key-file", one, "--key-file", two, "--yes")
    assert (status, "key 2 seals what is saved from now on" in out) == (0, True)
    assert opened(place, one).number == opened(place, two).number == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_somebody_who_left_could_read_is_sealed_anew_by_repack(cli, tmp_path, monkeypatch, ranks):
    place, stays, leaves = tmp_path / "sealed", tmp_path / "stays", tmp_path / "leaves"
    tenuto.save({"w": np.zeros(1)}, place, step=1)
    cli("key", "add", place, "--key-file", stays)
    cli("key", "add", place, "--key-file", leaves, "--with", stays)
    state = {"w": np.arange(5000.0)}

    def save(group):
        cut = slice(group.rank * 5000 // ranks, (group.rank + 1) * 5000 // ranks)
        part = tenuto.shard(state["w"][cut], whole=(5000,), offsets=(cut.start,))
        for step in (2, 3):
            tenuto.save({"w": part}, place, step=step, key=stays, ranks=group)
        return "saved"

    assert together(ranks, save) == ["saved"] * ranks
    shutil.copytree(place / "keys", tmp_path / "kept")

    def read_by_who_left(step):
        """With the store's files of now, and the keys of then."""
        theirs = tmp_path / f"theirs{step}"
        shutil.rmtree(theirs, ignore_errors=True)
        shutil.copytree(place, theirs)
        shutil.rmtree(theirs / "keys")
        shutil.copytree(tmp_path / "kept", theirs / "keys")
        return tenuto.load(theirs, step=step, key=leaves).state["w"]

    status, _, err = cli("key", "rm", place, "--slot", slots(place)[1], "--yes")
    assert status == 0, err
    status, _, err = cli("key", "rotate", place, "--key-file", stays, "--yes")
    assert (status, "tenuto repack" in err) == (0, True), err
    assert np.array_equal(read_by_who_left(3), state["w"]), "rotate alone encrypts nothing again"
    monkeypatch.setenv("TENUTO_KEY_FILE", str(stays))
    assert cli("repack", place, "--encoding", "plain", "--yes")[0] == 0
    assert cli("gc", place, "--now", "--yes")[0] == 0
    assert np.array_equal(tenuto.load(place, key=stays).state["w"], state["w"])
    for step in (2, 3):
        with pytest.raises(TenutoError):
            read_by_who_left(step)


def test_rm_says_what_is_lost_with_the_last_slot(cli, place, tmp_path, terminal):
    one, two = tmp_path / "one", tmp_path / "two"
    cli("key", "add", place, "--key-file", one)
    cli("key", "add", place, "--key-file", two, "--with", one)
    first, second = slots(place)
    status, _, err = cli("key", "rm", place, "--slot", second[:6])
    assert (status, "tenuto key rotate" in err) == (0, True)
    assert cli("key", "add", place, "--key-file", tmp_path / "three", "--with", two)[0] == 26
    status, _, err = cli("key", "rm", place, "--slot", first)
    assert (status, "nobody, you included, can read" in " ".join(err.split())) == (16, True), "a yes is not enough"
    status, out, err = cli("key", "rm", place, "--slot", first, "--yes")
    assert (status, "are destroyed" in out, "copies" in err) == (0, True, True)
    assert "were destroyed" in cli("key", "ls", place)[1]
    assert cli("key", "rotate", place, "--yes")[0] == 26
    assert cli("key", "add", place, "--key-file", one)[0] == 0
    assert opened(place, one).number == 2


def test_options_that_make_no_sense_are_refused(cli, place, tmp_path):
    key = tmp_path / "key"
    for words in (
        ("add",),
        ("add", "--key-file", key, "--env", "X"),
        ("add", "--key-file", key, "--key-file", tmp_path / "other"),
        ("add", "--key-file", key, "--slot", "a"),
        ("rm",),
        ("rm", "--slot", "a", "--env", "X"),
        ("rotate", "--passphrase"),
        ("rotate", "--with", key),
        ("ls", "--key-file", key),
    ):
        status, _, err = cli("key", words[0], place, *words[1:])
        assert (status, "hint: " in err) == (2, True), words
    assert not key.exists() and not (place / "keys").exists()


def test_verify_ls_and_gc_know_keys_and_need_none(cli, place, tmp_path):
    cli("key", "add", place, "--key-file", tmp_path / "key")
    assert "keys/" not in cli("verify", place)[1]
    assert cli("ls", place)[0] == 0
    before = sorted((place / "keys").iterdir())
    assert cli("gc", place, "--now", "--yes")[0] == 0
    assert sorted((place / "keys").iterdir()) == before
    assert_whole(Repo.open(open_store(place)))
    ring = (place / "keys/1.json").read_bytes()
    cli("key", "add", place, "--key-file", tmp_path / "key2", "--with", tmp_path / "key")
    (place / "keys/1.json").write_bytes(ring)
    assert "keys/1.json: an older key ring" in " ".join(cli("verify", place)[1].split())
    (place / "keys/2.json").write_bytes(ring)
    status, out, _ = cli("verify", place)
    assert (status, "nothing sealed here can be opened" in " ".join(out.split())) == (12, True)
    (place / "keys/notes.txt").write_text("mine")
    assert "not written by Tenuto" in cli("verify", place)[1]


def test_copies_elsewhere_have_the_newest_keys_alone(cli, place, tmp_path):
    key, copy = tmp_path / "key", tmp_path / "copy"
    cli("key", "add", place, "--key-file", key)
    repo = Repo.open(open_store(place))
    execute(repo, open_store(copy), plan_copy(repo, open_store(copy)))
    assert opened(copy, key).newest == opened(place, key).newest
    cli("key", "rotate", place, "--key-file", key, "--yes")
    execute(repo, open_store(copy), plan_copy(repo, open_store(copy), run="gpt"))
    assert [path.name for path in (copy / "keys").iterdir()] == ["2.json"], "what is removed here is removed there"
    assert opened(copy, key).newest == opened(place, key).newest
    assert ring_of(Repo.open(open_store(copy))) == ring_of(repo)


def test_sign_and_verify(cli, place, tmp_path):
    private, public = tmp_path / "me.pem", tmp_path / "me.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    private.chmod(0o600)
    status, out, _ = cli("sign", place, "7", "--run", "gpt", "--key", private)
    assert (status, out.startswith("gpt/a0002/7 is signed by ")) == (0, True)
    status, out, _ = cli("verify", place, "--run", "gpt", "--step", "7", "--signed-by", public)
    assert (status, out.splitlines()[-1]) == (0, "signed: every byte, by a key that was given")
    status, out, _ = cli("verify", place, "--run", "gpt", "--signed-by", public)
    assert (status, out.count("is not signed by any of the trusted keys")) == (12, 5)
    status, out, _ = cli("verify", place, "--run", "gpt", "--step", "7", "--signed-by", public, "--json")
    assert (status, json.loads(out)["ok"]) == (0, True)
    assert cli("verify", place, "--structure", "--signed-by", public)[0] == 2
    assert cli("sign", place, "7", "--run", "gpt", "--key", public)[0] == 2
