"""A window whose memory moves along the image: never more memory than the window, and the bytes where they were put."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tenuto.engine.staging import arena as arenas
from tenuto.engine.staging.arena import HUGE_PAGE, acquire_moving_window, can_move
from tenuto.engine.staging.buffer_layout import plan_layout
from tenuto.engine.staging.capture import Capturer
from tenuto.state.encode.flattener import flatten

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not can_move(), reason="this system moves no memory")

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
SAVE_ID = "7" * 32


def resident(address: int, nbytes: int) -> int:
    """Bytes of memory behind these addresses, as the kernel's page table has them."""
    first, last = address // PAGE, -(-(address + nbytes) // PAGE)
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(first * 8)
        entries = np.frombuffer(table.read((last - first) * 8), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(62))) * PAGE  # present, or swapped


@pytest.mark.parametrize(("nbytes", "window"), [(40 * MIB + 4097, 4 * MIB), (96 * MIB, 32 * MIB), (MIB, 64 << 10)])
def test_an_image_takes_no_more_memory_than_the_window(nbytes: int, window: int) -> None:
    arena = acquire_moving_window(nbytes, window)
    address, step = int(arena.buffer.ctypes.data), window // 8
    assert (arena.kind, arena.note, arena.window) == ("a window", "", window)
    for begin in range(0, arena.nbytes, step):
        end = min(begin + step, arena.nbytes)
        frontier = arena.frontier(end)
        assert end <= frontier <= end + window // 8
        arena.back(frontier)
        arena.buffer[begin:end] = begin // step % 250 + 1
        kept = max(0, frontier - window)
        assert arena.buffer[max(kept, begin - step)] in (begin // step % 250 + 1, (begin // step - 1) % 250 + 1)
        assert resident(address, arena.nbytes) <= max(window, HUGE_PAGE) + HUGE_PAGE
    arena.release()
    assert len(arena.buffer) == 0
    assert resident(address, nbytes) < nbytes


def test_what_has_not_moved_on_keeps_its_bytes() -> None:
    arena = acquire_moving_window(8 * MIB, MIB)
    arena.buffer[:MIB] = 7
    arena.back(arena.frontier(MIB + 1))
    moved = MIB // 8
    assert not arena.buffer[:moved].any(), "gone, and its addresses are still ours"
    assert (arena.buffer[moved : MIB + moved] == 7).all()
    arena.release()


def test_a_capture_waits_for_all_that_it_moves() -> None:
    flattened = flatten({"a": np.arange(5 * MIB, dtype=np.uint8)})
    layout = plan_layout(flattened.specs)
    arena = acquire_moving_window(layout.nbytes, MIB)
    admitted: list[int] = []
    filled: list[int] = []
    Capturer(flattened, layout, arena).capture(flattened, SAVE_ID, progress=filled.append, admit=admitted.append)
    unit = MIB // 8
    assert {position % unit for position in admitted} == {0}
    assert admitted[: len(filled)] == [-(-end // unit) * unit for end in filled[: len(admitted)]]
    arena.release()


def test_a_forked_child_has_no_moved_memory() -> None:
    arena = acquire_moving_window(8 * MIB, MIB)
    arena.buffer[:MIB] = 7
    arena.back(4 * MIB)
    addresses = range(int(arena.buffer.ctypes.data), int(arena.buffer.ctypes.data) + arena.nbytes)
    read, write = os.pipe()
    if os.fork() == 0:
        maps = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
        os.write(write, str(any(int(line.partition("-")[0], 16) in addresses for line in maps)).encode())
        os._exit(0)
    os.wait()
    assert os.read(read, 9) == b"False"
    os.close(read)
    os.close(write)
    arena.release()


@pytest.mark.parametrize(("nbytes", "window"), [(0, 0), (1, 4095), (4097, 5000)])
def test_the_smallest_windows_are_whole_pages(nbytes: int, window: int) -> None:
    arena = acquire_moving_window(nbytes, window)
    assert arena.window == 4096
    assert arena.nbytes == len(arena.buffer) == max(-(-nbytes // 4096), 1) * 4096
    arena.back(arena.frontier(arena.nbytes))
    arena.buffer[-1] = 3
    arena.release()


def test_a_system_that_moves_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(arenas, "_move", refuse)
    can_move.cache_clear()
    try:
        with pytest.raises(OSError) as caught:
            acquire_moving_window(MIB, 64 << 10)
        assert caught.value.errno == errno.ENOSYS
        monkeypatch.setattr(sys, "platform", "darwin")
        can_move.cache_clear()
        assert not can_move()
    finally:
        can_move.cache_clear()
