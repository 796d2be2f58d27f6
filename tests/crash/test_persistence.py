"""What may be on a disk after a crash: nothing the model allows is left out, nothing a flush made sure is in doubt."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from campaigns.persistence import RUBBISH, Instant, Persistence
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.testing.layers import Fault, Faulty
from tenuto.testing.recorder import Call, Recorder
from tenuto.testing.simulated_disk import BLOCK, Contents, SimulatedDisk


def instant(recorder: Recorder) -> Instant:
    persistence = Persistence(recorder.base)
    for number, step in enumerate(recorder.log):
        if isinstance(step, Call):
            persistence.replay(step, number)
    return persistence.now()


def states(recorder: Recorder) -> list[dict[str, Contents | None]]:
    now = instant(recorder)
    return [now.image(choice).tree() for choice in now.choices(1 << 16, random.Random(0))]


def data(state: dict[str, Contents | None], path: str) -> bytes | None:
    held = state.get(path)
    return None if held is None else held.data()


def new(recorder: Recorder, path: str, content: bytes) -> int:
    descriptor = recorder.create(path)
    recorder.pwrite(descriptor, [memoryview(content)], 0)
    return descriptor


def test_a_file_flush_makes_data_durable_and_no_name() -> None:
    recorder = Recorder(SimulatedDisk())
    recorder.fsync(new(recorder, "/file", b"x" * 5000))
    assert {data(state, "/file") for state in states(recorder)} == {None, b"x" * 5000}
    recorder.fsync_directory("/")
    assert {data(state, "/file") for state in states(recorder)} == {b"x" * 5000}


def test_a_directory_flush_makes_names_durable_and_no_data() -> None:
    recorder = Recorder(SimulatedDisk())
    content = b"x" * BLOCK + b"y" * BLOCK
    new(recorder, "/file", content)
    recorder.fsync_directory("/")
    found = {data(state, "/file") for state in states(recorder)}
    assert None not in found
    assert {b"", content, bytes(2 * BLOCK), RUBBISH + content[BLOCK:], content[:BLOCK] + bytes(BLOCK)} <= found
    torn = [held for held in found if held and b"x" in held[:BLOCK] and held[:BLOCK] != content[:BLOCK]]
    assert torn, "a block may be on the disk in part"


def test_an_entry_in_a_directory_whose_own_entry_is_not_flushed_is_lost_with_it() -> None:
    recorder = Recorder(SimulatedDisk())
    recorder.mkdir("/a")
    recorder.fsync(new(recorder, "/a/file", b"x"))
    recorder.fsync_directory("/a")
    assert {(("/a" in state), data(state, "/a/file")) for state in states(recorder)} == {(False, None), (True, b"x")}


def test_the_order_on_one_name_is_kept_and_on_two_it_is_not() -> None:
    recorder = Recorder(SimulatedDisk())
    recorder.fsync(new(recorder, "/old", b"x"))
    recorder.fsync_directory("/")
    recorder.link("/old", "/new")
    recorder.unlink("/old")
    found = {("/old" in state, "/new" in state) for state in states(recorder)}
    assert found == {(True, False), (True, True), (False, True), (False, False)}


def test_an_overwritten_block_is_old_new_or_torn_and_never_rubbish() -> None:
    recorder = Recorder(SimulatedDisk())
    descriptor = new(recorder, "/file", b"o" * BLOCK)
    recorder.fsync(descriptor)
    recorder.fsync_directory("/")
    recorder.pwrite(descriptor, [memoryview(b"n" * BLOCK)], 0)
    found = {data(state, "/file") for state in states(recorder)}
    assert {b"o" * BLOCK, b"n" * BLOCK} < found
    assert all(held is not None and set(held) <= set(b"on") for held in found)


def test_a_size_may_lag_behind_and_a_cut_may_be_lost() -> None:
    recorder = Recorder(SimulatedDisk())
    descriptor = new(recorder, "/file", b"p" * BLOCK)
    recorder.fsync(descriptor)
    recorder.fsync_directory("/")
    recorder.truncate(descriptor, 10)
    assert {data(state, "/file") for state in states(recorder)} == {b"p" * 10, b"p" * BLOCK}


@pytest.mark.parametrize("again", [False, True])
def test_after_a_failed_flush_no_later_one_counts(again: bool) -> None:
    recorder = Recorder(Faulty(SimulatedDisk(), Fault("fsync", errno.EIO)))
    descriptor = new(recorder, "/file", b"x" * BLOCK)
    recorder.fsync_directory("/")
    with pytest.raises(OSError):
        recorder.fsync(descriptor)
    if again:
        recorder.fsync(descriptor)
    assert {b"", RUBBISH, b"x" * BLOCK} <= {data(state, "/file") for state in states(recorder)}


def test_written_anew_after_a_failed_flush_it_can_be_flushed() -> None:
    recorder = Recorder(Faulty(SimulatedDisk(), Fault("fsync", errno.EIO)))
    descriptor = new(recorder, "/file", b"x" * BLOCK)
    recorder.fsync_directory("/")
    with pytest.raises(OSError):
        recorder.fsync(descriptor)
    recorder.pwrite(descriptor, [memoryview(b"y" * BLOCK)], 0)
    recorder.fsync(descriptor)
    blocks = {held[:BLOCK] for state in states(recorder) if (held := data(state, "/file"))}
    assert blocks == {b"y" * BLOCK}


def scribble(recorder: Recorder, below: str) -> None:
    for name in ("one", "two"):
        recorder.mkdir(f"{below}/{name}")
        descriptor = new(recorder, f"{below}/{name}/temporary", name.encode() * 3000)
        recorder.truncate(descriptor, 5000)
        recorder.fsync(descriptor)
        recorder.close(descriptor)
        recorder.link(f"{below}/{name}/temporary", f"{below}/{name}/final")
        recorder.fsync_directory(f"{below}/{name}")
        recorder.unlink(f"{below}/{name}/temporary")
    recorder.unlink(f"{below}/one/final")
    recorder.rmdir(f"{below}/one")
    recorder.rename_noreplace(f"{below}/two/final", f"{below}/two/renamed")


def test_nothing_lost_is_what_the_program_saw() -> None:
    disk = SimulatedDisk()
    recorder = Recorder(disk)
    scribble(recorder, "")
    now = instant(recorder)
    newest = [variable.count - 1 for variable in now.variables]
    assert now.image(newest).tree() == disk.image().tree()


def test_a_recording_goes_on_from_a_crash_state() -> None:
    first = Recorder(SimulatedDisk())
    scribble(first, "")
    now = instant(first)
    image = now.image([0] * len(now.variables))
    second = Recorder(SimulatedDisk.holding(image), base=image)
    assert instant(second).image([]).tree() == image.tree()
    second.fsync(new(second, "/three", b"3"))
    second.fsync_directory("/")
    assert all(data(state, "/three") == b"3" for state in states(second))


def test_a_real_directory_is_recorded_as_the_simulated_one(tmp_path: object) -> None:
    real, simulated = Recorder(OperatingSystem(), root=str(tmp_path)), Recorder(SimulatedDisk())
    scribble(real, str(tmp_path))
    scribble(simulated, "")
    assert real.log == simulated.log


def _choices(count: int, limit: int) -> Callable[[], list[tuple[int, ...]]]:
    recorder = Recorder(SimulatedDisk())
    new(recorder, "/file", b"x" * (count * BLOCK))
    now = instant(recorder)
    return lambda: list(now.choices(limit, random.Random(7)))


def test_few_combinations_are_all_tried_and_many_sampled_the_same_way_each_time() -> None:
    assert len(set(_choices(2, 1000)())) == 2 * 2 * 4 * 4
    sampled = _choices(12, 200)
    chosen = sampled()
    assert chosen == sampled() and len(chosen) == 200
    newest = max(chosen)
    assert chosen[0] == newest == tuple(map(max, zip(*chosen, strict=True)))
    assert tuple(0 for _ in newest) in chosen
    for at in range(len(newest)):
        assert (*newest[:at], 0, *newest[at + 1 :]) in chosen
