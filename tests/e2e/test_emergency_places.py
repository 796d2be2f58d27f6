"""A training whose own store does not take its last state puts it into an emergency place; the next start goes on from
there, if training has gone on from nothing else. Real processes; the store is full, or hangs, on command."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tenuto
from support.emergency_training import KEPT_IN_MEMORY, LOOP, TRAIN, answers, place, ran, ranks_ran, untouched
from support.supervised import TENUTO, await_that, finished
from support.troubled_store import variables
from tenuto.maintenance.verify import assert_whole
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, **variables(tmp_path)}


@pytest.mark.parametrize("kind", ["full", pytest.param("hung", marks=pytest.mark.long)])
def test_what_the_store_does_not_take_at_a_signal_is_resumed_bit_for_bit(
    tmp_path: Path, environment: dict[str, str], kind: str
) -> None:
    expected = untouched()
    first = ran(tmp_path, LOOP, environment, status=143, KIND=kind)
    assert "step 8 of run main is saved in the emergency location" in first.stderr
    answers(tmp_path)
    copy = Repo.open(open_store(place(tmp_path)))
    assert_whole(copy)
    assert copy.committed("main", 1) == [8] and copy.id == Repo.open(open_store(tmp_path / "ckpts")).id
    second = ran(tmp_path, LOOP, environment)
    assert f"took over step 8 of run main from the emergency location {place(tmp_path)}: main/a0002/8" in second.stderr
    assert second.stdout == expected
    assert copy.committed("main", 1) == []
    assert_whole(Repo.open(open_store(tmp_path / "ckpts")))
    third = ran(tmp_path, LOOP, environment)
    assert "emergency" not in third.stderr


def test_the_end_of_a_training_is_not_lost_on_a_full_disk(tmp_path: Path, environment: dict[str, str]) -> None:
    script = LOOP.replace("os.kill", "(lambda *_: None)")
    first = ran(tmp_path, script, environment, status=1, KIND="full")
    assert "step 20 of run main is saved in the emergency location" in first.stderr
    answers(tmp_path)
    second = ran(tmp_path, script, environment)
    assert "took over step 20" in second.stderr and second.stdout == untouched()


def test_a_start_that_finds_no_room_for_it_leaves_nothing_behind(tmp_path: Path, environment: dict[str, str]) -> None:
    ran(tmp_path, LOOP, environment, status=143, KIND="full")
    again = ran(tmp_path, LOOP, environment, status=1)
    assert "StoreFull: no space left" in again.stderr and "took over" not in again.stderr
    answers(tmp_path)
    assert "took over step 8" in ran(tmp_path, LOOP, environment).stderr


def test_a_kill_in_the_middle_of_an_emergency_save_leaves_nothing_torn(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    script = LOOP.replace("trouble(kind)", "assert ckpt.save(wait=True) if step == 3 else True; trouble(kind)").replace(
        "with tenuto",
        'die = lambda: os.kill(os.getpid(), 9)\nwith armed("packs and indexes durable, manifest not yet", die), tenuto',
    )
    first = ran(tmp_path, script, environment, status=-9, KIND="full")
    assert "is saved" not in first.stderr
    answers(tmp_path)
    copy = Repo.open(open_store(place(tmp_path)))
    assert copy.committed("main", 1) == [] and copy.steps("main", 1) == [8]
    second = ran(tmp_path, LOOP, environment)
    assert second.stdout == untouched()
    assert not list(place(tmp_path).rglob("*.safetensors")), "what was begun is freed"
    assert_whole(copy)


def test_a_kill_in_the_middle_of_taking_over_loses_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    expected = untouched()
    ran(tmp_path, LOOP, environment, status=143, KIND="full")
    answers(tmp_path)
    for point in ("attempt claimed", "copies put, none visible", "emergency checkpoint taken over, still in its place"):
        script = LOOP.replace("with tenuto", f'with armed("{point}", lambda: os.kill(os.getpid(), 9)), tenuto')
        ran(tmp_path, script, environment, status=-9)
        assert_whole(Repo.open(open_store(tmp_path / "ckpts")))
    last = ran(tmp_path, LOOP, environment)
    assert last.stdout == expected and "resumed run main at step 8" in last.stderr
    assert not list(place(tmp_path).rglob("*.safetensors"))


def test_where_training_has_gone_on_it_is_left_alone_and_named(tmp_path: Path, environment: dict[str, str]) -> None:
    ran(tmp_path, LOOP, environment, status=143, KIND="full")
    answers(tmp_path)
    (tmp_path / "other").rename(tmp_path / "unplugged")
    expected = ran(tmp_path, LOOP, environment).stdout
    (tmp_path / "other").rename(tmp_path / "empty")
    (tmp_path / "unplugged").rename(tmp_path / "other")
    later = ran(tmp_path, LOOP, environment)
    assert later.stdout == expected
    named = re.search(
        r"step 8 of run main in the emergency location \S+ is left alone: (.*?); `(.*?)` takes it", later.stderr
    )
    assert named and "attempt 2 has gone further, to step 20" in named[1], later.stderr
    words = named[2].replace("NEWRUN", "rescued").split()
    subprocess.run([*TENUTO, *words[1:]], check=True, capture_output=True, env=environment, cwd=tmp_path)
    assert tenuto.load(tmp_path / "ckpts", run="rescued").step == 8
    assert tenuto.load(tmp_path / "ckpts").step == 20
    directory = re.search(r"its directory (\S+) there", later.stderr)
    assert directory
    shutil.rmtree(place(tmp_path) / directory[1])
    assert "emergency" not in ran(tmp_path, LOOP, environment).stderr


def test_a_process_that_was_superseded_puts_nothing_that_anybody_takes_over(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """The first process is stopped right before its emergency save, and right before its commit; another one claims the
    run meanwhile, and is killed before it has saved anything."""
    for number, point in enumerate(("save begun", "packs and indexes durable, manifest not yet")):
        directory = tmp_path / str(number)
        directory.mkdir()
        env = {**environment, **variables(directory)}
        waits = """
def wait():
    if os.path.exists("trouble"):
        pathlib.Path("there").touch()
        while not os.path.exists("go"):
            time.sleep(0.01)
with armed(POINT, wait), tenuto""".replace("POINT", repr(point))
        (directory / "train.py").write_text(TRAIN + LOOP.replace("with tenuto", waits))
        zombie = subprocess.Popen(
            [sys.executable, "train.py"], cwd=directory, env={**env, "KIND": "full"}, text=True, stderr=subprocess.PIPE
        )
        await_that((directory / "there").exists)
        answers(directory)
        script = LOOP.replace("**more)", "**more, takeover=True, wait_for_owner=0.1)").replace(
            "if step == 7 and", "if step == 12: os.kill(os.getpid(), 9)\n        if step == 7 and"
        )
        ran(directory, script, env, status=-9)
        (directory / "go").touch()
        zombie.communicate(timeout=100)
        last = ran(directory, LOOP, env)
        assert "took over" not in last.stderr and "resumed" not in last.stderr, last.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")
@pytest.mark.parametrize("kind", ["ok", "full", "hung"])
def test_an_error_makes_the_newest_sealed_state_durable(tmp_path: Path, environment: dict[str, str], kind: str) -> None:
    """It goes to the store if that takes it, else to the emergency place, and shared memory is not needed any more."""
    first = ran(tmp_path, KEPT_IN_MEMORY, environment, status=1, KIND=kind)
    assert "ValueError: bad data" in first.stderr
    (tmp_path / "trouble").unlink(missing_ok=True)
    subprocess.run(
        [*TENUTO, "memory", "clear", "ckpts", "--yes"], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    second = ran(tmp_path, KEPT_IN_MEMORY, environment)
    assert second.stdout == untouched()
    assert ("took over step 7" in second.stderr) == (kind != "ok"), second.stderr
    assert "resumed run main at step 7 from" in second.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")
@pytest.mark.parametrize(
    "kind", [pytest.param("full", marks=pytest.mark.long), "hung", pytest.param("gone", marks=pytest.mark.long)]
)
def test_a_supervisor_that_gives_up_puts_it_there_and_its_next_start_takes_it_over(
    tmp_path: Path, environment: dict[str, str], kind: str
) -> None:
    script = TRAIN + KEPT_IN_MEMORY.replace('raise ValueError("bad data")', "os.kill(os.getpid(), 9)").replace(
        "**more)", "save=more['save'])"
    )
    named = variables(tmp_path)
    first = finished(
        tmp_path, script, "--restarts", "0", "--emergency", str(tmp_path / "other"), variables={**named, "KIND": kind}
    )
    assert "does not take what is left in memory" in first.stderr, first.stderr
    assert f"saved from memory: main/a0001/7 in the emergency location {place(tmp_path)}" in first.stderr, first.stderr
    answers(tmp_path)
    if kind == "hung":  # as on another machine; else the image goes with what is taken over
        subprocess.run([*TENUTO, "memory", "clear", "ckpts", "--yes"], cwd=tmp_path, env=environment, check=False)
    second = finished(tmp_path, script, "--emergency", str(tmp_path / "other"), variables=named)
    assert "took over step 7" in second.stderr and second.returncode == 0, second.stderr
    assert "passed over" not in second.stderr
    assert second.stdout == untouched()


@pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")
def test_a_newer_state_in_memory_is_resumed_from(tmp_path: Path, environment: dict[str, str]) -> None:
    """The second process cannot reach the emergency place, starts afresh, and is killed before it has saved."""
    loop = LOOP.replace("**more)", "memory=every(steps=1), **more)")
    ran(tmp_path, loop, environment, status=143, KIND="full")
    answers(tmp_path)
    (tmp_path / "other").rename(tmp_path / "unplugged")
    (tmp_path / "other").touch()
    killed = """
        if step == 12:
            while ckpt.stats.kept_in_memory < 4:
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        if step == 7 and"""
    second = ran(tmp_path, loop.replace("\n        if step == 7 and", killed), environment, status=-9)
    assert "resumed" not in second.stderr, "what is safe elsewhere does not stay in memory"
    (tmp_path / "other").unlink()
    (tmp_path / "unplugged").rename(tmp_path / "other")
    third = ran(tmp_path, loop, environment)
    assert "took over" not in third.stderr, third.stderr
    assert re.search(r"resumed run main at step 1[0-2] from memory", third.stderr), third.stderr
    assert third.stdout == untouched()


def test_a_place_that_cannot_be_used_is_said_at_the_start_and_the_next_one_is_used(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "file").touch()
    script = LOOP.replace("**more)", "**{**more, 'emergency': ['file', 'other']})")
    first = ran(tmp_path, script, environment, status=143, KIND="full")
    assert re.search(r"the emergency location \S*/file/\w+ cannot be used", first.stderr), first.stderr
    assert "step 8 of run main is saved in the emergency location" in first.stderr
    assert place(tmp_path).is_dir()


def test_a_place_that_is_lost_during_training_takes_nothing_that_nobody_would_find(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    script = LOOP.replace("trouble(kind)", "os.rename('other', 'unplugged'); trouble(kind)").replace(
        "**more)", "**{**more, 'emergency': ['other', 'second']})"
    )
    first = ran(tmp_path, script, environment, status=143, KIND="full")
    assert "has lost what was there at the start" in first.stderr
    assert f"step 8 of run main is saved in the emergency location {place(tmp_path, 'second')}" in first.stderr
    assert not (tmp_path / "other").exists()
    answers(tmp_path)
    assert "took over step 8" in ran(tmp_path, script, environment).stderr


def test_the_signal_of_a_process_whose_store_works_needs_no_emergency_place(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN + LOOP.replace("trouble(kind)", "pass"))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env={**environment, "KIND": "ok"}, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert not list(place(tmp_path).rglob("*.safetensors"))


@pytest.mark.parametrize("kind", ["full", pytest.param("hung", marks=pytest.mark.long)])
def test_ranks_that_share_a_place_save_there_together(tmp_path: Path, environment: dict[str, str], kind: str) -> None:
    first = ranks_ran(tmp_path, environment, KIND=kind, STEPS="1000000")
    assert [status for status, _, _ in first] == [143, 143], first
    saved = re.search(r"step (\d+) of run main is saved in the emergency location", first[0][2])
    assert saved and "is saved" not in first[1][2], first
    answers(tmp_path)
    copy = Repo.open(open_store(place(tmp_path)))
    assert_whole(copy)
    (step,) = copy.committed("main", 1)
    assert str(step) == saved[1] and len(copy.manifest(tenuto.open(place(tmp_path)).id).indexes) == 2
    second = ranks_ran(tmp_path, environment, STEPS=str(step + 5))
    assert f"took over step {step} of run main" in second[0][2], second
    (tmp_path / "alone").mkdir()
    untroubled = ranks_ran(tmp_path / "alone", environment, STEPS=str(step + 5))
    assert [out for _, out, _ in second] == [out for _, out, _ in untroubled]


def test_a_place_that_not_all_ranks_see_is_refused_at_the_start(tmp_path: Path, environment: dict[str, str]) -> None:
    first = ranks_ran(tmp_path, environment, KIND="full", OWN="1", STEPS="1000000")
    assert "all ranks have to share an emergency location, and it is not used" in first[0][2], first
    assert not list(tmp_path.rglob("node-*/**/*.safetensors"))


REAL = """
state = {"w": np.zeros(1_000_000)}  # 8 MB
def step_of(state):
    state["w"][: 1000] += np.random.rand(1000)
def trouble(kind):
    with open("ckpts/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
"""


def test_a_file_system_that_is_really_full(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN + REAL + LOOP)
    script = f"""
        mkdir ckpts && mount -t tmpfs -o size=64m tmpfs ckpts || exit 77
        KIND=full {sys.executable} train.py; echo left with $?
        df --output=avail ckpts | tail -1
        rm ckpts/filler
        {sys.executable} train.py
    """
    command = ["unshare", "-m", "sh", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mount namespace to be had")
    lines = done.stdout.splitlines()
    assert [line.strip() for line in lines[:2]] == ["left with 143", "0"], done
    assert "step 8 of run main is saved in the emergency location" in done.stderr
    assert "took over step 8 of run main from the emergency location" in done.stderr
    (tmp_path / "alone").mkdir()
    assert lines[2:] == ran(tmp_path / "alone", REAL + LOOP, environment).stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="the memory tier lies in shared memory on Linux only")
def test_a_supervisor_whose_training_has_saved_elsewhere_flushes_nothing_older(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """The store is well again when the supervisor looks at what is left."""
    loop = LOOP.replace("**more)", "memory=every(steps=1), **more)") + "\n"
    heals = "import atexit\natexit.register(lambda: os.path.exists('trouble') and os.remove('trouble'))\n"
    script = TRAIN + heals + loop
    named = variables(tmp_path)
    first = finished(tmp_path, script, "--restarts", "0", variables={**named, "KIND": "full"})
    assert "is saved in the emergency location" in first.stderr and "saved from memory" not in first.stderr
    assert not (tmp_path / "trouble").exists()
    second = ran(tmp_path, loop, environment)
    assert "took over step 8" in second.stderr and "left alone" not in second.stderr, second.stderr
    assert second.stdout == untouched()
