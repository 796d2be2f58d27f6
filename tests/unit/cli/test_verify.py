import json

import pytest

from tenuto.errors import StoreFull
from tenuto.store.local.store import LocalStore

from .conftest import flip

PACK = "runs/gpt/a0002/step-00000007/rank-00000.safetensors"
FIRST = "runs/gpt/a0001/step-00000002/rank-00000.safetensors"


@pytest.fixture
def no_room_for_notes(monkeypatch):
    """The names of the notes that were tried."""
    tried, put = [], LocalStore.put_if_absent

    def full(self, name, content, *, token):
        if "/notes/" in name:
            tried.append(name)
            raise StoreFull("there is no room", subject=name, hint="make some")
        return put(self, name, content, token=token)

    monkeypatch.setattr(LocalStore, "put_if_absent", full)
    return tried


def test_verify_whole(cli, made):
    assert cli("verify", made) == (
        0,
        "7 checkpoints: whole (1.17 MiB read in 1 ms)\n",
        "verifying 7 checkpoints at /ckpts: every byte of 1.17 MiB, and everything else there\n",
    )


def test_verify_names_the_damaged_leaf_and_leaves_with_12(cli, place):
    flip(place / PACK, 4096 + 10)
    status, out, err = cli("verify", place, "--run", "gpt")
    assert status == 12
    assert (
        out
        == f"""\
DAMAGED  gpt/a0002/7 model/layers.0.bias: 2048 bytes are not what was saved
         in {PACK} at byte 4096
1 of 6 checkpoints DAMAGED; 1 error (1.17 MiB read in 1 ms)
"""
    )
    assert err.splitlines()[-1] == (
        "hint: tenuto repair /ckpts --dry-run shows what can be repaired; "
        "restoring passes over damaged ones, as far as gpt/a0002/5"
    )


def test_verify_structure_reads_no_leaf(cli, place):
    flip(place / PACK, 4096 + 10)
    status, out, _ = cli("verify", place, "--structure")
    assert status == 0
    assert "structure whole" in out
    (place / PACK).unlink()
    assert cli("verify", place, "--structure")[0] == 12


def test_verify_one_step(cli, place):
    flip(place / PACK, 4096 + 10)
    assert cli("verify", place, "--run", "gpt", "--step", "5")[0] == 0
    assert cli("verify", place, "--run", "gpt", "--step", "latest")[0] == 12


def test_verify_json(cli, place):
    flip(place / PACK, 4096 + 10)
    status, out, _ = cli("verify", place, "--json")
    found = json.loads(out)
    assert (status, found["schema"], found["ok"]) == (12, "tenuto.verify/1", False)
    assert found["damaged"] == [{"run": "gpt", "attempt": 2, "step": 7}]
    (finding,) = [finding for finding in found["findings"] if finding["severity"] == "error"]
    assert (finding["leaf"], finding["object"], finding["offset"]) == ("model/layers.0.bias", PACK, 4096)


def test_verify_note_is_seen_by_ls(cli, place):
    flip(place / PACK, 4096 + 10)
    assert cli("verify", place, "--run", "gpt", "--note")[0] == 12
    marks = [row.split("  ") for row in cli("ls", place, "--run", "gpt")[1].splitlines()]
    assert "latest, SUSPECT" in marks[2]
    assert "left behind, verified" in marks[4]


def test_a_note_that_cannot_be_put_hides_no_damage(cli, place, no_room_for_notes):
    flip(place / FIRST, 4096 + 10)
    status, out, err = cli("verify", place, "--run", "gpt", "--note")
    assert status == 12
    assert out.splitlines()[0] == "DAMAGED  gpt/a0001/2 model/layers.0.bias: 2048 bytes are not what was saved"
    assert "1 of 6 checkpoints DAMAGED" in out
    assert "warning: the result is not noted with every checkpoint: there is no room" in err.splitlines()
    assert err.splitlines()[-1].startswith("hint: tenuto repair ")
    assert len(no_room_for_notes) == 1, "no more are tried"
    status, out, _ = cli("verify", place, "--run", "gpt", "--note", "--json")
    found = json.loads(out)
    assert (status, len(found["checked"]), found["not_noted"]) == (12, 6, "there is no room")
    assert found["damaged"] == [{"run": "gpt", "attempt": 1, "step": 2}]


def test_what_is_whole_and_cannot_be_noted_is_told_and_ends_with_the_stores_error(cli, place, no_room_for_notes):
    status, out, err = cli("verify", place, "--run", "gpt", "--note")
    assert (status, out.startswith("6 checkpoints: whole")) == (StoreFull.exit_code, True)
    assert err.splitlines()[-2:] == ["error: there is no room", "hint: make some"]
    status, out, err = cli("verify", place, "--run", "gpt", "--note", "--json")
    found = json.loads(out)
    assert (status, found["ok"], found["not_noted"]) == (StoreFull.exit_code, True, "there is no room")
    assert "there is no room" in err


def test_a_note_needs_every_byte_read(cli, place):
    before = sorted(place.rglob("*"))
    status, out, err = cli("verify", place, "--structure", "--note")
    assert (status, out, err) == (2, "", "error: --note needs every byte read\nhint: leave --structure out\n")
    assert sorted(place.rglob("*")) == before


def test_verify_without_note_writes_nothing(cli, place):
    before = sorted(path for path in place.rglob("*"))
    cli("verify", place)
    cli("ls", place)
    cli("show", place, "--run", "gpt")
    assert sorted(path for path in place.rglob("*")) == before


def test_a_save_without_a_manifest_does_not_end_the_verification_of_its_run(cli, place):
    (place / "runs/gpt/a0002/step-00000009").mkdir()
    (place / "runs/gpt/a0002/step-00000009/begin.json").write_bytes(b"?")
    status, out, _ = cli("verify", place, "--run", "gpt")
    assert (status, out.startswith("6 checkpoints: whole")) == (0, True)
    assert cli("verify", place, "--run", "gpt", "--step", "9")[0] == 11


def test_a_manifest_that_is_damaged_is_verified_with_its_run(cli, place):
    flip(place / "runs/gpt/a0002/step-00000007/manifest.json", 40)
    status, out, _ = cli("verify", place, "--run", "gpt")
    assert (status, "1 of 6 checkpoints DAMAGED" in out) == (12, True)


def test_damage_that_is_not_noted_says_how_ls_comes_to_know_of_it(cli, place):
    flip(place / PACK, 4096 + 10)
    status, _, err = cli("verify", place)
    assert status == 12 and "note: nothing was written down; with --note `tenuto ls`" in err
    assert "SUSPECT" not in cli("ls", place)[1]
    status, _, err = cli("verify", place, "--note")
    assert status == 12 and "written down" not in err
    assert "SUSPECT" in cli("ls", place)[1]
