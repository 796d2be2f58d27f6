"""A cache before a slow store: what is asked of the store, what is kept, and what is noticed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack

import pytest

from tenuto.errors import CorruptionError, ObjectNotFound, StoreDenied, TenutoWarning
from tenuto.store.contract import Bytes
from tenuto.store.memory import MemoryStore
from tenuto.store.wrappers import cache
from tenuto.store.wrappers.cache import Blocks, Cached
from tenuto.store.wrappers.delegating import DelegatingStore

MIB = 2**20
DATA = os.urandom(5 * MIB + 12345)
PACK = "runs/a/rank-00000.safetensors"


class Counting(DelegatingStore):
    """Counts what is read of it: (name, offset, length)."""

    def __init__(self, inner):
        super().__init__(inner)
        self.reads = []

    def open(self, name):
        reader = super().open(name)
        whole = reader.fetch

        def fetch(offset, buffer):
            self.reads.append((name, offset, len(buffer)))
            whole(offset, buffer)

        reader.fetch = fetch
        return reader


@pytest.fixture
def far(request):
    store = Counting(MemoryStore(request.node.nodeid))
    store.put_if_absent(PACK, Bytes(DATA), token="t0")
    return store


def read(store, offset=0, length=None):
    buffer = bytearray(len(DATA) if length is None else length)
    with store.open(PACK) as reader:
        reader.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def files(directory):
    return [path for path in (directory / "blocks").rglob("*") if path.is_file()]


def used(directory):
    return sum(path.stat().st_size for path in files(directory))


def test_what_was_read_once_is_not_asked_for_again(far, tmp_path):
    for _ in range(2):
        assert read(Cached(far, tmp_path / "cache")) == DATA
    assert sorted(far.reads) == [(PACK, at, min(MIB, len(DATA) - at)) for at in range(0, len(DATA), MIB)]
    assert read(Cached(far, tmp_path / "cache"), MIB - 7, 14) == DATA[MIB - 7 : MIB + 7]
    assert len(far.reads) == 6


def test_what_decides_is_always_asked_of_the_store(far, tmp_path):
    far.put_if_absent("runs/a/manifest.json", Bytes(b"1"), token="t0")
    store = Cached(far, tmp_path / "cache")
    for name in ("runs/a/manifest.json",):
        for _ in range(2):
            with store.open(name) as reader:
                reader.read_into(0, memoryview(bytearray(1)))
            assert store.get(name, limit=1) == b"1"
    assert len(far.reads) == 2 and not (tmp_path / "cache").exists()


def test_an_index_is_cached_whichever_way_it_is_read(far, tmp_path):
    far.put_if_absent("runs/a/rank-00000.index", Bytes(b"rows"), token="t0")
    store = Cached(far, tmp_path / "cache")
    assert [store.get("runs/a/rank-00000.index", limit=4) for _ in range(2)] == [b"rows", b"rows"]
    assert len(far.reads) == 1
    with pytest.raises(CorruptionError):
        store.get("runs/a/rank-00000.index", limit=3)


@pytest.mark.parametrize("harm", ["flip", "truncate", "lengthen", "empty", "exchange"])
def test_a_harmed_block_is_noticed_and_fetched_anew(far, tmp_path, harm):
    store = Cached(far, tmp_path / "cache")
    read(store)
    blocks = [path for path in files(tmp_path / "cache") if path.stat().st_size > MIB]
    if harm == "exchange":
        contents = [path.read_bytes() for path in blocks]
        for path, other in zip(blocks, contents[1:] + contents[:1], strict=True):
            path.write_bytes(other)
    else:
        for path in blocks:
            data = bytearray(path.read_bytes())
            data[1000] ^= 1
            path.write_bytes({"flip": data, "truncate": data[:-1], "lengthen": data + b"1", "empty": b""}[harm])
    before = len(far.reads)
    assert read(store) == DATA
    assert len(far.reads) - before == len(blocks) == 5
    assert read(store) == DATA
    assert len(far.reads) - before == 5


def test_an_object_written_anew_is_not_taken_from_the_cache(far, tmp_path):
    store = Cached(far, tmp_path / "cache")
    read(store)
    store.delete([PACK])
    with pytest.raises(ObjectNotFound):
        store.open(PACK)
    other = DATA[::-1]
    store.put_if_absent(PACK, Bytes(other), token="t1")
    assert read(store) == other


def test_the_limit_holds_and_what_was_not_read_for_longest_goes(far, tmp_path):
    store = Cached(far, tmp_path / "cache", limit=4 * MIB)
    for number in range(3):
        read(store, number * MIB, MIB)
    for age, path in enumerate(sorted(files(tmp_path / "cache"), key=lambda path: path.name)):
        os.utime(path, ns=(10**18 + age, 10**18 + age))
    read(store, 0, MIB)  # the oldest, and now the newest
    far.reads.clear()
    read(store, 3 * MIB, MIB)
    assert used(tmp_path / "cache") <= 4 * MIB
    read(store, 0, MIB)
    assert [offset for _, offset, _ in far.reads] == [3 * MIB]
    for _ in range(3):
        assert read(store) == DATA
        assert used(tmp_path / "cache") <= 4 * MIB


def test_a_block_larger_than_the_limit_is_not_kept(far, tmp_path):
    store = Cached(far, tmp_path / "cache", limit="100KB")
    assert read(store, 0, MIB) == DATA[:MIB]
    assert not files(tmp_path / "cache")


@pytest.mark.parametrize("text", [b"", b"?", b"-1", b"99999999999999999999"])
def test_a_damaged_count_is_counted_anew(far, tmp_path, text):
    store = Cached(far, tmp_path / "cache")
    read(store)
    (tmp_path / "cache/locks/used").write_bytes(text)
    read(store)
    far.put_if_absent("b.pack", Bytes(b"1"), token="t0")
    store.get("b.pack", limit=1)
    assert int((tmp_path / "cache/locks/used").read_bytes()) == used(tmp_path / "cache")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_full_or_failing_directory_is_passed_by_with_one_warning(far, tmp_path, monkeypatch, number, caplog):
    def replace(source, target):
        raise OSError(number, os.strerror(number), target)

    monkeypatch.setattr(os, "replace", replace)
    store = Cached(far, tmp_path / "cache")
    with warnings.catch_warnings(record=True) as told:  # in a thread that runs no code of the user's it is logged
        warnings.simplefilter("always", TenutoWarning)
        assert read(store) == read(store) == DATA
    (said,) = [*(str(one.message) for one in told), *(record.getMessage() for record in caplog.records)]
    assert "reads go to the store itself" in said
    assert len(far.reads) == 12 and not files(tmp_path / "cache")


def test_where_no_directory_can_be_is_an_error_that_names_it(far, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreDenied, match=str(tmp_path / "file")):
        read(Cached(far, tmp_path / "file" / "cache"))


def test_threads_that_want_one_block_fetch_it_once(far, tmp_path):
    barrier = threading.Barrier(8)
    found = []

    def work():
        store = Cached(far, tmp_path / "cache")
        barrier.wait(60)
        found.append(read(store, 0, MIB))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [DATA[:MIB]] * 8
    assert len(far.reads) == 1


PROGRAM = """
import sys
from tenuto.store.wrappers.cache import Cached
store = Cached(sys.argv[1], sys.argv[2], limit=10 * 2**20)
for turn in range(3):
    for name in ("a.pack", "b.pack", "c.pack"):
        found = store.get(name, limit=2**30)
        assert found == name[:1].encode() * len(found), name
"""


def test_processes_share_the_directory_and_its_limit(tmp_path):
    from tenuto.store.local.store import LocalStore

    far = LocalStore(tmp_path / "far")
    for name in "abc":
        far.put_if_absent(f"{name}.pack", Bytes(name.encode() * (5 * MIB)), token="t0")
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "far"), str(tmp_path / "cache")]
    running = [subprocess.Popen(words) for _ in range(2)]
    assert [process.wait(120) for process in running] == [0, 0]
    assert 5 * MIB < used(tmp_path / "cache") <= 10 * MIB


def test_a_lock_of_a_dead_process_is_free(tmp_path):
    program = (
        "import os, sys, pathlib\nfrom tenuto.store.wrappers.cache import Blocks\n"
        "with Blocks(pathlib.Path(sys.argv[1]), 100).fetching('k-0'): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 9
    with Blocks(tmp_path, 100).fetching("k-0"):
        pass


def test_a_process_that_stops_while_it_has_the_locks_holds_up_no_other(far, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache, "FETCH_WAIT_S", 0.0)
    monkeypatch.setattr(cache, "ROOM_WAIT_S", 0.0)
    (tmp_path / "cache" / "locks").mkdir(parents=True)
    (tmp_path / "cache" / "blocks").mkdir()
    with ExitStack() as held:
        for name in ("used", *(f"fetch-{number}" for number in range(256))):
            fcntl.flock(held.enter_context(open(tmp_path / "cache" / "locks" / name, "w")), fcntl.LOCK_EX)
        assert read(Cached(far, tmp_path / "cache")) == DATA
    assert "reads go to the store itself" in caplog.text
    assert not files(tmp_path / "cache")


def test_a_child_forked_while_a_block_is_fetched_does_not_keep_its_lock(tmp_path):
    blocks = Blocks(tmp_path / "cache", 100 * MIB)
    mine, childs = os.pipe()
    with blocks.fetching("key"):
        child = os.fork()
        if child == 0:
            os.close(childs)
            os.read(mine, 1)  # until the parent closes it
            os._exit(0)
    try:
        for path in (tmp_path / "cache" / "locks").iterdir():
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(childs)
        os.waitpid(child, 0)
        os.close(mine)


def test_room_that_was_taken_counts_before_its_block_is_there(tmp_path):
    blocks = Blocks(tmp_path / "cache", 3 * MIB)
    with blocks._locked("used", 1.0):
        pass
    assert blocks._take_room(MIB, tmp_path / "cache/blocks/aa/a.tmp-0")
    (tmp_path / "cache/locks/used").write_text("unreadable")  # so that the next one counts what lies there
    for number in range(3):
        blocks.write(f"bb{number}", memoryview(bytes(MIB - 16)))
        assert used(tmp_path / "cache") <= 3 * MIB
    assert int((tmp_path / "cache/locks/used").read_text()) >= used(tmp_path / "cache")
