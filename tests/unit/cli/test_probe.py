"""`tenuto probe`: each thing that a place may lack is found on a place that lacks it."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest

from tenuto.bench import probe as probing
from tenuto.bench import raw
from tenuto.bench.place import FileSystemFacts
from tenuto.bench.probe import MIB, Cell, Probe, Prober, caches_attributes, warnings
from tenuto.cli.commands.probe import show
from tenuto.errors import StoreError
from tenuto.store import probes, registry
from tenuto.store.contract import Bytes, Entry, Store
from tenuto.store.memory import MemoryStore
from tenuto.store.registry import open_store
from tenuto.store.wrappers.delegating import DelegatingStore


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def name(request):
    return request.node.nodeid


class Clock:
    """Every byte put or read takes time, and nothing else does."""

    def __init__(self, rate=10e6):
        self.now, self.rate, self.lock = 0.0, rate, threading.Lock()

    def __call__(self):
        return self.now

    def moved(self, nbytes):
        with self.lock:
            self.now += nbytes / self.rate


class Timed(DelegatingStore):
    def __init__(self, inner, clock):
        super().__init__(inner)
        self.clock = clock

    def put_if_absent(self, name, content, *, token):
        self.clock.moved(content.length)
        return super().put_if_absent(name, content, token=token)

    def get(self, name, *, limit):
        found = super().get(name, limit=limit)
        self.clock.moved(len(found))
        return found

    def open(self, name):
        reader = super().open(name)
        whole = reader.fetch

        def fetch(offset, buffer):
            self.clock.moved(len(buffer))
            whole(offset, buffer)

        reader.fetch = fetch
        return reader


def probed(store: Store, again: Store | None = None, *, rate: float = 1e9, limit_s: float = 20, **more) -> Probe:
    clock = Clock(rate)
    found = Prober(Timed(store, clock), lambda: again or store, limit_s=limit_s, clock=clock, **more).run()
    assert not list(store.walk("", leftovers=True)), "it cleans up after itself"
    return found


def test_a_whole_place(name):
    found = probed(MemoryStore(name))
    assert found.atomic and found.lists_times and found.seen_after_s == 0
    assert len(found.put_s) == len(found.get_s) == 40
    assert {(cell.parallel, cell.nbytes // MIB) for cell in found.cells} == {
        (1, 1), (4, 1), (1, 16), (16, 1), (4, 16), (1, 64), (4, 64), (16, 16),
    }  # fmt: skip
    assert found.best == Cell(1, MIB, pytest.approx(1e9), pytest.approx(1e9))
    assert warnings(found) == ["a flush has no effect here: what was saved does not survive a power loss"]


def test_a_place_that_replaces_what_is_there_can_hold_copies_only(name):
    class Replacing(MemoryStore):
        def put_if_absent(self, name, content, *, token):
            self.delete([name])
            return super().put_if_absent(name, content, token=token)

    found = probed(Replacing(name))
    assert found.atomic is False
    assert "can hold copies" in warnings(found)[0] and "cannot be the primary" in warnings(found)[0]


def test_a_place_that_lets_two_of_sixteen_win_is_not_atomic(name):
    class Racy(MemoryStore):
        """Looks, and then puts: whoever looks before the first put wins too."""

        barrier = threading.Barrier(16)

        def put_if_absent(self, name, content, *, token):
            if token.startswith("racer"):
                self.barrier.wait(60)
                self.delete([name])
            return super().put_if_absent(name, content, token=token)

    assert probed(Racy(name)).atomic is False


@pytest.mark.parametrize(("late", "words"), [(math.inf, "not within 2 s"), (0.5, "after 0.50 s"), (0.001, "")])
def test_a_place_that_others_see_late(late, words):
    told = warnings(Probe("x", seen_after_s=late))
    assert bool(told) is bool(words) and (not told or words in told[0])


def test_a_handle_that_never_sees_is_not_waited_for_longer_than_two_seconds(name):
    clock = Clock()

    class Blind(MemoryStore):
        def stat(self, name):
            clock.now += 0.5
            return super().stat(name)

    store = MemoryStore(name)
    found = Prober(store, lambda: Blind(f"{name} another"), clock=clock).run()
    assert found.seen_after_s == math.inf
    assert json.loads(json.dumps(found.document()))["seen_after_s"] is None


def test_a_place_without_times_in_its_listings(name):
    class Timeless(MemoryStore):
        def walk(self, prefix, *, leftovers=False):
            return (Entry(one.name, one.length) for one in super().walk(prefix, leftovers=leftovers))

    assert not probed(Timeless(name)).lists_times


def test_a_slow_place_is_called_so_and_keeps_within_its_time(name):
    found = probed(MemoryStore(name), rate=2e6, limit_s=20)
    assert found.cells and max(cell.parallel * cell.nbytes for cell in found.cells) <= 16 * MIB
    assert any("slow: 1.91 MiB/s at best" in text for text in warnings(found))


def test_a_nearly_full_place_is_called_so_and_not_filled(name):
    class Full(MemoryStore):
        def free_bytes(self):
            return 5 * MIB

    found = probed(Full(name))
    assert [(cell.parallel, cell.nbytes) for cell in found.cells] == [(1, MIB)]
    assert any("nearly full: 5.00 MiB left" in text for text in warnings(found))


def test_a_place_that_gives_other_bytes_is_refused(name):
    class Lying(MemoryStore):
        def get(self, name, *, limit):
            return super().get(name, limit=limit)[::-1]

    with pytest.raises(StoreError, match="gives other bytes than were put"):
        probed(Lying(name))


def test_what_a_killed_probe_left_is_said(name):
    store = MemoryStore(name)
    store.put_if_absent("tenuto-probe-0", Bytes(b""), token="t0")
    assert any("1 object of a probe that was killed" in text for text in warnings(Prober(store, lambda: store).run()))


@pytest.mark.parametrize("at", range(1, 9))
def test_it_cleans_up_however_it_is_interrupted(name, at):
    store, said = MemoryStore(name), []

    def interrupt(text):
        said.append(text)
        if len(said) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probed(store, on_activity=interrupt)
    assert not list(store.walk("", leftovers=True))


def test_the_file_system_of_a_directory(tmp_path):
    clock = Clock(rate=1e6)

    class PutsTimed(DelegatingStore):
        """Its puts alone: what is looked at past the store takes no time, however busy the machine is."""

        def put_if_absent(self, name, content, *, token):
            clock.moved(content.length)
            return super().put_if_absent(name, content, token=token)

    store = PutsTimed(open_store(tmp_path))
    found = Prober(store, lambda: open_store(tmp_path), directory=tmp_path, limit_s=1, clock=clock).run()
    assert found.links and found.file_system is not None and len(found.flush_s) == 10
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_links_and_direct_io(tmp_path, monkeypatch):
    def refused(*arguments, **options):
        raise OSError(95, "not supported")

    monkeypatch.setattr(probing.os, "link", refused)
    monkeypatch.setattr(raw, "write", refused)
    store = MemoryStore(str(tmp_path))
    found = Prober(store, lambda: store, directory=tmp_path, limit_s=1).run()
    assert (found.links, found.direct) == (False, False)
    assert any(text.startswith("no direct I/O") for text in warnings(found))
    assert list(tmp_path.iterdir()) == []


def test_flushes_without_effect_are_called_so():
    disk = Probe("/x", file_system=FileSystemFacts("ext4", False, False), flush_s=[2e-3] * 10)
    assert not warnings(disk)
    memory = replace(disk, file_system=FileSystemFacts("tmpfs", True, False))
    for one in (memory, replace(disk, flush_s=[5e-6] * 10), replace(disk, persistent=False)):
        assert warnings(one) == ["a flush has no effect here: what was saved does not survive a power loss"]


@pytest.mark.parametrize(
    ("options", "caches"), [("rw,vers=4.2", True), ("rw,noac", False), ("rw,actimeo=0,vers=3", False)]
)
def test_network_file_systems_that_cache_attributes(options, caches):
    mounts = f"disk / ext4 rw 0 0\nserver:/export /shared nfs4 {options} 0 0\n"
    assert caches_attributes(Path("/shared/run"), mounts) is caches
    assert not caches_attributes(Path("/sharedness"), mounts)
    told = warnings(Probe("/shared", cached_attributes=caches))
    assert bool(told) is caches and (not told or "actimeo=0" in told[0])


# What is shown and kept.

SHOWN = """\
/shared/checkpoints
  create if absent       NOT ATOMIC
  seen by others         after 0.50 s
  times in listings      no
  file system            nfs4
  hard links             yes
  direct I/O             no: through the page cache
  flush of a small file  median 2.0 ms, 95 % within 9.0 ms
  put of 4 KiB           median 3.0 ms, 95 % within 3.0 ms
  get of 4 KiB           median 1.0 ms, 95 % within 1.0 ms
  free                   5.00 GiB
  best read by           4 requests of 16.0 MiB at a time

put / get, by size and requests at a time
                                  1                        4  16
   1.00 MiB  9.54 MiB/s / 9.54 MiB/s  19.1 MiB/s / 28.6 MiB/s   -
   16.0 MiB                       -  38.1 MiB/s / 47.7 MiB/s   -
   64.0 MiB                       -                        -   -

what to look at
"""


def test_the_table(capsys):
    show(
        Probe(
            "/shared/checkpoints", atomic=False, seen_after_s=0.5, links=True, direct=False,
            file_system=FileSystemFacts("nfs4", False, True), flush_s=[2e-3] * 9 + [9e-3], put_s=[3e-3], get_s=[1e-3],
            cells=[Cell(1, MIB, 10e6, 10e6), Cell(4, MIB, 20e6, 30e6), Cell(4, 16 * MIB, 40e6, 50e6)],
            free_bytes=5 << 30, cached_attributes=True,
        )
    )  # fmt: skip
    out = capsys.readouterr().out
    head, _, told = out.partition("what to look at\n")
    assert " ".join(head.split()) == " ".join(SHOWN.partition("what to look at")[0].split())
    assert [line.split()[1] for line in told.splitlines() if line.startswith("  -")] == [
        "/shared/checkpoints", "others", "no", "slow:", "nearly", "a",
    ]  # fmt: skip


def test_the_command_keeps_its_result(cli, tmp_path):
    (tmp_path / "place").mkdir()
    status, out, err = cli("probe", tmp_path / "place", "--seconds", "1", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["schema"] == "tenuto.probe/1" and found["atomic"] and found["cells"]
    assert "probing: sixteen put one name" in err
    assert list((tmp_path / "place").iterdir()) == []
    kept = probes.kept(str(tmp_path / "place"))
    assert kept is not None and kept["parallel"] == found["parallel"]
    status, out, err = cli("probe", tmp_path / "nowhere")
    assert status == 2 and "mkdir" in err and not (tmp_path / "nowhere").exists()


def test_an_object_store_is_read_as_was_found_best(monkeypatch, name):
    class Backend:
        @staticmethod
        def open_url(url):
            return MemoryStore(url.partition("://")[2])

    monkeypatch.setitem(sys.modules, "a_backend", Backend)
    monkeypatch.setattr(registry, "_BACKENDS", {"far": ("a_backend", "far")})
    url = MemoryStore("bucket").url
    before = open_store("far://bucket").capabilities
    probes.keep(url, {"parallel": 33, "part_bytes": 12 * MIB})
    assert open_store("far://bucket").capabilities == replace(before, parallel=33, part_bytes=12 * MIB)
    for harm in ({"parallel": 0, "part_bytes": 1}, {"parallel": None, "part_bytes": None}, {"parallel": 10**9}):
        probes.keep(url, harm)
        assert open_store("far://bucket").capabilities == before
    probes.path_of(url).write_bytes(b"?")
    assert open_store("far://bucket").capabilities == before


def test_a_put_that_no_pool_waits_for_leaves_nothing(name, monkeypatch):
    """As where a signal interrupts the start of its thread."""
    begun, prober = threading.Event(), None

    class Slow(DelegatingStore):
        def put_if_absent(self, name, content, *, token):
            begun.set()
            assert prober._stop.wait(60)  # the probe is ending by now
            return super().put_if_absent(name, content, token=token)

    store = Slow(MemoryStore(name))
    prober = Prober(store, lambda: store)
    thread = threading.Thread(target=prober._put, args=(b"late",))

    def interrupted(found):
        thread.start()
        assert begun.wait(60)
        raise SystemExit(143)

    monkeypatch.setattr(prober, "_do", interrupted)
    with pytest.raises(SystemExit):
        prober.run()
    thread.join(60)
    assert not list(store.walk("", leftovers=True))
    with pytest.raises(CancelledError):
        prober._put(b"later")


TOLD = """
import os, signal, sys, threading
from tenuto.cli import main
from tenuto.store.local.store import LocalStore

whole, told = LocalStore.put_if_absent, threading.Lock()

def put(store, name, content, **more):
    if content.length == 1 << 20 and told.acquire(blocking=False):  # one of those whose speed is measured, and once
        print("told to end", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    return whole(store, name, content, **more)

LocalStore.put_if_absent = put
main(["probe", sys.argv[1], "--seconds", "600"])
"""


def test_a_probe_that_is_told_to_end_leaves_nothing(tmp_path):
    """It tells itself so, in the middle of a put: on a fast machine it may be done before anybody else does."""
    (tmp_path / "place").mkdir()
    words = [sys.executable, "-c", TOLD, str(tmp_path / "place")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stdout.startswith("told to end\n")
    assert list((tmp_path / "place").iterdir()) == []
