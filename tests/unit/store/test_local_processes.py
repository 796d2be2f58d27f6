"""Real processes that race for names, and one that is killed in the middle."""

from __future__ import annotations

import signal

import pytest

from support import loaded_interpreter
from tenuto.store.contract import Bytes, leftovers_of
from tenuto.store.local.store import LocalStore

RACER = """
import sys
from tenuto.errors import AlreadyExists
from tenuto.store.local.store import LocalStore
from tenuto.store.contract import Bytes

where, me, names = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = LocalStore(where)
print("ready", flush=True)
sys.stdin.readline()
for number in range(names):
    try:
        store.put_if_absent(f"refs/tag/{number}/x", Bytes(me.encode() * 5000), token=me)
        print(number, flush=True)
    except AlreadyExists:
        pass
    store.delete([f"refs/other/{number}/x"])
    store.put_if_absent(f"refs/other/{number}/{me}/y", Bytes(b"1"), token=me)
    store.delete([f"refs/other/{number}/{me}/y"])
"""

KILLED = """
import os, signal, sys
from tenuto.store.local.store import LocalStore
from tenuto.store.contract import leftovers_of

class Deadly:
    length = 3 * 2**20
    def pieces(self):
        yield memoryview(bytes(2**20))
        os.kill(os.getpid(), signal.SIGKILL)

LocalStore(sys.argv[1]).put_if_absent("runs/a/x", Deadly(), token="t0")
"""


@pytest.mark.parametrize("racers", [3])
def test_processes_that_race_for_names_have_one_winner_each(tmp_path, racers):
    names = 25
    command = ["-c", RACER, str(tmp_path / "store")]
    processes = [loaded_interpreter.Program([*command, f"p{number}", str(names)]) for number in range(racers)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    won = {}
    for number, process in enumerate(processes):
        out, err = process.communicate()
        assert process.returncode == 0, err
        for line in out.split():
            assert int(line) not in won, "two winners"
            won[int(line)] = f"p{number}"
    assert sorted(won) == list(range(names))
    store = LocalStore(tmp_path / "store")
    for number, winner in won.items():
        assert store.get(f"refs/tag/{number}/x", limit=10**5) == winner.encode() * 5000
    assert len(list(store.walk(""))) == names
    assert not list(leftovers_of(store, ""))


def test_a_process_killed_while_it_puts_leaves_a_temporary_and_no_object(tmp_path):
    ended = loaded_interpreter.run(["-c", KILLED, str(tmp_path / "store")])
    assert ended.returncode == -signal.SIGKILL
    store = LocalStore(tmp_path / "store")
    assert not list(store.walk(""))
    assert [entry.name for entry in leftovers_of(store, "")] == ["runs/a/x.tmp-t0"]
    assert store.put_if_absent("runs/a/x", Bytes(b"whole"), token="t0").length == 5
    assert not list(leftovers_of(store, ""))


AT_EXIT = """
import atexit, os, sys
import numpy as np
import tenuto

state = {"a": np.arange(10)}
tenuto.save(state, f"{sys.argv[1]}/first", run="x", step=1)
atexit.register(lambda: print(tenuto.save(state, f"{sys.argv[1]}/second", run="x", step=2).id))
atexit.register(lambda: print(tenuto.save(state, f"{sys.argv[1]}/first", run="y", step=3).id))
"""


def test_new_directories_are_made_at_the_end_of_the_interpreter_too(tmp_path):
    done = loaded_interpreter.run(["-c", AT_EXIT, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["y/a0001/3", "x/a0001/2"] and "Error" not in done.stderr


HUNG = """
import sys, threading
from tenuto.store.contract import Bytes
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem

store, reached = LocalStore(sys.argv[1]), threading.Event()
store.put_if_absent("one", Bytes(b"1"), token="t")

def hang(self, path):
    reached.set()
    threading.Event().wait()

OperatingSystem.fsync_directory = hang
put = lambda: store.put_if_absent("tombstones/x/a0001/1/y", Bytes(b"1"), token="t")
threading.Thread(target=put, daemon=True).start()
assert reached.wait(60)
"""


def test_i8_a_flush_that_hangs_does_not_keep_the_process_from_ending(tmp_path):
    done = loaded_interpreter.run(["-c", HUNG, str(tmp_path)])
    assert done.returncode == 0, done.stderr
