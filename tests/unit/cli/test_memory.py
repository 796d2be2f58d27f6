import json
import os
import pwd
import sys
from dataclasses import replace

import pytest

from support.memory_ranks import Ends
from support.memory_ranks import live as live_ranks
from support.memory_training import live
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")


@pytest.fixture
def left(tmp_path, root):
    """What a killed training left: step 7 of run main in memory, nothing in the store."""
    assert live(tmp_path / "ckpts", kill=7).killed
    return tmp_path / "ckpts"


def images(cli, *words):
    status, out, _ = cli("ls", "--memory", *words, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["schema"] == "tenuto.memory/1"
    return sorted(found["images"], key=lambda image: image["checkpoint"]["step"] if image["sealed"] else -1)


def me():
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def test_a_user_whom_nobody_knows_is_shown_by_number():
    from tenuto.cli.views.memory_images import user_name

    stranger = max(one.pw_uid for one in pwd.getpwall()) + 1
    assert (user_name(os.geteuid()), user_name(stranger)) == (me(), str(stranger))


def test_a_directory_that_only_looks_like_a_users_is_told_of(cli, left, root):
    (root / f"tenuto-{os.geteuid() + 1}").symlink_to(f"tenuto-{os.geteuid()}")
    status, out, err = cli("ls", "--memory")
    assert (status, len(out.splitlines()), err.count("\n")) == (0, 3, 1)
    assert f"/tenuto-{os.geteuid() + 1} is passed over: it is not a directory" in err
    found = json.loads(cli("ls", "--memory", "--json")[1])
    assert (len(found["images"]), found["closed_users"], len(found["passed_over"])) == (2, 0, 1)


def test_ls_memory_shows_whose_they_are_and_their_age(cli, left):
    for found in (images(cli), images(cli, left), images(cli, "--run", "main")):
        assert [image["checkpoint"]["step"] for image in found] == [6, 7]
        assert {image["owner"] for image in found} == {"dead"}
        assert {(image["user"], image["uid"], image["pid"]) for image in found} == {(me(), os.geteuid(), None)}
        assert all(image["adoptable"] and 0 <= image["age_s"] < 600 and image["bytes"] > 100_000 for image in found)
        assert all(image["where"].endswith("/ckpts") for image in found)
    rows = cli("ls", "--memory")[1].splitlines()
    assert [word in rows[0] for word in ("RUN", "ATTEMPT", "STEP", "SEALED", "USER", "OWNER", "STATE")] == [True] * 7
    assert "PID" not in rows[0], "no column for what nothing has"
    assert f"  {me()}  " in rows[1]
    assert "dead" in rows[1]
    assert "a restart resumes from it" in rows[1]
    assert images(cli, "--run", "other") == []
    assert cli("ls", "--memory", "--run", "other")[1:] == ("", "no images in this node's memory\n")


def test_ls_without_a_repository_wants_one_or_the_option(cli):
    status, _, err = cli("ls")
    assert (status, "tenuto ls --memory" in err) == (2, True)


def test_flush_writes_the_newest_and_takes_it_out_of_memory(cli, left):
    status, out, _ = cli("flush", left, "--dry-run", "--json")
    plan = json.loads(out)
    assert (status, plan["chosen"]["step"], plan["written"]) == (0, 7, None)
    status, out, _ = cli("flush", left)
    assert status == 0
    assert out.splitlines()[-1].startswith("main/a0002/7 is written, ")
    assert_whole(Repo.open(open_store(left)))
    assert [image["checkpoint"]["step"] for image in images(cli)] == [6]
    assert "a step of attempt 2" not in str(images(cli))
    assert cli("flush", left)[1].splitlines()[-1] == "run main: nothing in memory is to be written"
    again = live(left)
    assert (again.began, again.source.startswith(f"from {left}")) == (7, True)


def test_flush_says_why_it_writes_none(cli, left):
    path = left / "runs/main/a0001/attempt.json"
    path.write_bytes(path.read_bytes().replace(b'"attempt"', b'"attempx"', 1))
    status, out, _ = cli("flush", left, "--run", "main", "--json")
    found = json.loads(out)
    assert (status, found["chosen"]) == (0, None)
    assert all("cannot be read" in image["state"] for image in found["images"])


def test_a_damaged_image_is_not_written(cli, left, root):
    from tenuto.engine.memory_tier.listing import images as found

    newest = max(found(), key=lambda one: one.footer.sequence)
    path = root / f"tenuto-{os.geteuid()}" / newest.name
    data = bytearray(path.read_bytes())
    data[newest.footer.image // 2] ^= 1
    path.write_bytes(data)
    status, _, err = cli("flush", left)
    assert (status, "damaged" in err) == (12, True)
    assert not (left / "runs/main/a0002").exists(), "nothing is claimed for what cannot be written"


def test_clear_asks_and_removes_what_is_dead(cli, left, root):
    status, out, err = cli("memory", "clear", left)
    assert (status, "--yes" in err) == (2, True)
    assert len(images(cli)) == 2
    assert json.loads(cli("memory", "clear", left, "--dry-run", "--json")[1])["removed"] == []
    nothing = "no dead process of yours has left an image in memory\n"
    assert cli("memory", "clear", left, "--run", "other", "--yes")[1] == nothing
    out = cli("memory", "clear", left, "--yes")[1]
    assert out.splitlines()[-1].startswith("2 images removed, ")
    assert images(cli) == []
    assert live(left).began == 0


def test_clear_leaves_what_belongs_to_another_repository_alone_unless_all_are_meant(cli, left, tmp_path, root):
    status, _, err = cli("memory", "clear", "--yes")
    assert (status, err.splitlines()[0]) == (2, "error: whose images? Give a repository, or --all for those of all")
    assert cli("memory", "clear", left, "--all", "--yes")[0] == 2
    Repo.create_or_open(open_store(tmp_path / "other"))
    nothing = "no dead process of yours has left an image in memory\n"
    assert cli("memory", "clear", tmp_path / "other", "--yes")[1] == nothing
    assert len(images(cli)) == 2
    assert cli("memory", "clear", "--all", "--yes")[1].splitlines()[-1].startswith("2 images removed, ")
    assert images(cli) == []


def test_images_of_a_running_process_are_shown_and_stay(cli, tmp_path, root, monkeypatch):
    import numpy as np

    import tenuto
    from tenuto import every

    state = {"w": np.zeros(1000)}
    with tenuto.Checkpointer(tmp_path / "ckpts", state, memory=every(steps=1)) as ckpt:
        for _ in ckpt.steps(3):
            state["w"] += 1
        assert ckpt._training.saving.memory._saver.join(30)
        found = json.loads(cli("ls", "--memory", "--json")[1])["images"]
        assert {(image["owner"], image["pid"]) for image in found} == {("alive", os.getpid())}
        monkeypatch.setenv("COLUMNS", "200")
        rows = [line.split() for line in cli("ls", "--memory")[1].splitlines()]
        place = rows[0].index("PID") - rows[0].index("USER")
        assert {row[row.index(me()) + place] for row in rows[1:]} == {str(os.getpid())}
        assert {image["state"] for image in found} == {"its process is running"}
        for where in (tmp_path / "ckpts", "--all"):
            status, out, _ = cli("memory", "clear", where, "--yes")
            rows = out.splitlines()
            assert status == 0
            assert rows[0].startswith(f"left alone, of running processes or other users: {len(found)} images, ")
            assert len(rows) == len(found) + 3 and all("its process is running" in row for row in rows[2:-1])
            assert rows[-1] == "no dead process of yours has left an image in memory"
        assert len(json.loads(cli("memory", "clear", "--all", "--yes", "--json")[1])["left_alone"]) == len(found)
    assert images(cli) == []


@pytest.fixture
def left_by_two(tmp_path, root):
    """What the killed ranks of a job left: steps 6 and 7 of both."""
    ends = {rank: Ends(step=7, settled=True) for rank in (0, 1)}
    assert all(life.killed for life in live_ranks(tmp_path / "ckpts", ends=ends))
    return tmp_path / "ckpts"


def test_images_of_several_ranks_say_which_rank_of_how_many(cli, left_by_two, root):
    found = [image for image in images(cli) if image["sealed"]]
    whose = sorted((image["checkpoint"]["step"], image["rank"], image["ranks"]) for image in found)
    assert whose == [(6, 0, 2), (6, 1, 2), (7, 0, 2), (7, 1, 2)]
    assert {image["state"] for image in found} == {"a restart resumes from it"}
    rows = [line.split() for line in cli("ls", "--memory")[1].splitlines()]
    assert rows[0][:2] == ["RUN", "RANK"]
    assert sorted(row[1] for row in rows[1:] if row[2:4] == ["of", "2"]) == ["0", "0", "1", "1"]


def test_a_state_of_which_a_rank_is_missing_is_shown_and_not_flushed(cli, left_by_two, root):
    path = next(path for path in root.rglob("1of2-*") if image_step(path) == 7)
    path.unlink()
    states = {(image["checkpoint"]["step"], image["rank"]): image["state"] for image in images(cli) if image["sealed"]}
    assert states[7, 0] == "a restart resumes from it where rank 1 has it too: not here"
    assert states[6, 0] == states[6, 1] == "a restart resumes from it"
    status, out, _ = cli("flush", left_by_two)
    assert status == 0
    assert out.splitlines()[-1].startswith("main/a0002/6 is written, ")
    assert cli("memory", "clear", "--all", "--yes")[0] == 0
    assert images(cli) == []


def test_what_another_user_has_completes_nobodys_state(left_by_two):
    """One who cannot hold this user's image could lay a copy of it."""
    from tenuto.cli.views.memory_images import judged, words

    rows = judged(None, None)
    first = next(row for row in rows if row[0].footer.rank == 0)
    assert words(*first, rows) == "a restart resumes from it"
    stranger = os.geteuid() + 1
    rows = [
        (one if one.footer.rank == 0 else replace(one, slot=replace(one.slot, user=stranger)), verdict)
        for one, verdict in rows
    ]
    assert words(*first, rows) == "a restart resumes from it where rank 1 has it too: not here"


def image_step(path):
    from tenuto.engine.memory_tier.listing import images as found

    return next((one.footer.id.step for one in found() if one.name.endswith(path.name) and one.footer), None)
