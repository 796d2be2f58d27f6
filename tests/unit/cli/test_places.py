"""Commands on a repository that lies in several places: each is given the home, and finds the others."""

import json

import numpy as np
import pytest

import tenuto
from support.broken_places import damage

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def mirrored(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for number in range(2):
        tenuto.save({"w": np.full(50_000, float(number))}, tenuto.Mirror(a, b))
    return a, b


def pack(place, step):
    return place / f"runs/main/a0001/step-{step:08d}/rank-00000.safetensors"


def test_show_says_where_the_packs_lie(cli, mirrored):
    a, b = mirrored
    pack(b, 1).unlink()
    out = " ".join(cli("show", a)[1].split())
    assert f"data files in {a}: 1 of 1" in out and str(b) not in out
    assert f"data files in {b}: 1 of 1" in " ".join(cli("show", a, "--step", "0")[1].split())
    assert json.loads(cli("show", a, "--json")[1])["packs_in"] == {str(a): 1}


def test_replicate_brings_a_mirror_what_it_lacks(cli, mirrored):
    a, b = mirrored
    pack(b, 1).unlink()
    status, out, err = cli("replicate", a, "--dry-run")
    assert (status, err) == (0, "")
    assert out == f"to {b}\n  main/a0001/1  1 data file, 397 KiB\n"
    assert not pack(b, 1).exists()
    status, out, _ = cli("replicate", a)
    assert (status, out.splitlines()[-1]) == (0, "397 KiB copied")
    assert pack(b, 1).read_bytes() == pack(a, 1).read_bytes()
    assert cli("replicate", a)[1] == "nothing to copy\n"


def test_replicate_goes_on_past_damage_and_tells_it(cli, mirrored):
    a, b = mirrored
    pack(b, 0).unlink()
    pack(b, 1).unlink()
    damage(pack(a, 1))
    status, _, err = cli("replicate", a)
    assert status == 12 and "w is damaged" in err
    assert pack(b, 0).exists() and not pack(b, 1).exists()
    found = json.loads(cli("replicate", a, "--json")[1])
    assert (found["schema"], len(found["failed"]), found["bytes"]) == ("tenuto.replicate/1", 1, 0)


def test_a_mirror_that_is_not_there_is_in_the_exit_status(cli, mirrored):
    a, b = mirrored
    b.rename(b.with_name("away"))
    status, _, err = cli("replicate", a)
    assert status == 18 and f"{b} is not found" in err
    status, out, _ = cli("verify", a)
    assert status == 0 and f"{b} is not found from here: not looked at" in " ".join(out.split())


def test_what_changes_something_is_given_the_home(cli, mirrored):
    a, b = mirrored
    for words in (["rm", b, "0", "--yes"], ["tag", b, "good", "--step", "0"], ["keep", b, "--latest", "1", "--yes"]):
        status, _, err = cli(*words)
        assert status != 0 and f"whose primary is {a}" in err, words
    assert cli("ls", b)[0] == cli("verify", b)[0] == 0
