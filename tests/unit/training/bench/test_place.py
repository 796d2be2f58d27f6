"""The measured place: refused where it does not fit, left as it was however a measurement ends."""

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tenuto.bench import place, raw
from tenuto.bench.measure import even_sizes, make_arrays, numpy_sample
from tenuto.errors import StoreDenied, StoreError, StoreFull, UsageError


def test_refusals_come_before_the_first_byte(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="absent is not a directory"):
        place.check_place(str(tmp_path / "absent"), 1)
    with pytest.raises(UsageError, match="not a directory of this machine"):
        place.check_place("s3://bucket/x", 1)
    with pytest.raises(StoreFull, match=r"takes .* are free") as caught:
        place.check_place(str(tmp_path), 1 << 60)
    assert "nothing has been written" in caught.value.hint
    monkeypatch.setattr(place, "memory_headroom", lambda: 300 << 20)
    assert place.check_place(str(tmp_path), 20 << 20) == tmp_path
    with pytest.raises(UsageError, match="of memory; 300 MiB are free"):
        place.check_place(str(tmp_path), 30 << 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, ValueError])
def test_the_directory_goes_however_the_block_ends(tmp_path, ending):
    (tmp_path / "mine").write_text("stays")
    with pytest.raises(ending):
        with place.workplace(tmp_path) as own:
            (own / "deep").mkdir()
            (own / "deep" / "file").write_bytes(b"x")
            assert own.parent == tmp_path
            assert own.name.startswith(".tenuto-bench-")
            raise ending
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, StoreFull), (errno.EROFS, StoreDenied), (errno.EIO, StoreError)]
)
def test_what_the_system_says_is_told_in_the_stores_words(tmp_path, number, kind):
    with pytest.raises(kind, match="measuring in") as caught:
        with place.workplace(tmp_path):
            raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind
    assert caught.value.hint


def test_what_a_killed_measurement_left_is_named_and_not_touched(tmp_path):
    (tmp_path / ".tenuto-bench-dead").mkdir()
    assert place.leftovers(tmp_path) == [str(tmp_path / ".tenuto-bench-dead")]
    with place.workplace(tmp_path):
        pass
    assert (tmp_path / ".tenuto-bench-dead").is_dir()


def test_the_mount_table_names_the_file_system():
    found = place.file_system_of(place.Path("/dev/shm"))
    assert (found.name, found.volatile, found.network) == ("tmpfs", True, False)


@pytest.mark.parametrize("length", [3 * 4096, 4096 * 8, 4096 * 21])
def test_raw_loops_move_every_byte_also_where_memory_is_smaller(tmp_path, length):
    data = raw.aligned(4096 * 8)
    data[:] = np.random.default_rng(1).integers(0, 256, len(data), np.uint8)
    path = tmp_path / "raw"
    for direct in (True, False):
        assert raw.write(path, data, 4096 * 3, length=length, direct=direct) > 0
        assert path.read_bytes() == (data.tobytes() * 3)[:length]
        into = raw.aligned(length)
        assert raw.read(path, into, 4096 * 2, direct=direct) > 0
        assert into.tobytes() == path.read_bytes()


def test_a_loop_that_moves_less_than_it_says_is_no_figure(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * 4096)
    with pytest.raises(OSError, match="4096 of 8192 bytes"):
        raw.read(path, raw.aligned(8192), 8192, direct=False)


def test_cold_and_hot_are_what_they_say():
    """On a disk: what lies in memory is never cold."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "file")
        path.write_bytes(b"x" * (1 << 20))
        raw.warm_cache(path.parent)
        assert raw.still_cached(path.parent) == {str(path): 1.0}
        raw.drop_cache(path.parent)
        assert raw.still_cached(path) == {}


def test_samples_have_the_sizes_asked_for_and_copy_all():
    sizes = [8, 4, 7, 1, 4096]
    sample = numpy_sample(sizes)
    assert [array.nbytes for array in sample.arrays.values()] == sizes
    assert sample.nbytes == sum(sizes)
    into = {name: np.zeros_like(array) for name, array in sample.arrays.items()}
    sample.copy(into)
    assert all(into[name].tobytes() == array.tobytes() for name, array in sample.arrays.items())
    before = sample.fingerprint()
    sample.arrays["leaf-4"].view(np.uint8)[4000] ^= 1
    assert sample.fingerprint() != before
    assert even_sizes(1000, 3) == [332, 332, 332]
    assert len({array.tobytes() for array in make_arrays([64, 64]).values()}) == 2
    with pytest.raises(UsageError, match="too few"):
        even_sizes(10, 5)
