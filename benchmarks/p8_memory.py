"""P8: host memory of a save and of a restore, as the peak of a memory control group.

    python benchmarks/p8_memory.py --gib 1          (as root, or in a group delegated to this user)

Each contender works in a process of its own, alone in a group: first everything a training holds anyway (the state,
the libraries, for a restore the tensors to be filled), then, watched, the save or the restore. Two figures: memory
that nobody but its owner gives back (anonymous and shared memory, looked at every 2 ms), which is the one that targets
are about, and the kernel's own peak of everything, page cache included, which it drops when memory is short. That the
second is honest to ignore is shown by doing it again under a hard limit: one page more than it may give back, and the
kernel kills the process.

Shared memory is charged to the group of whoever touched a page first, and stays charged to it when that process has
died: the kernel goes on counting it in the groups above, such as a scheduler's job or a container. So the memory tier's
two images count as their owner's in the save, and lie in what the group of the next process holds before it restores:
owner and restorer work in one group, one after the other, as in a container that is restarted. What is charged to whom
when they are in two groups is measured beside it, as a fact.
Target: a save at most the state + 64 MiB above the training's own, twice the state + 64 MiB with the memory tier; a
restore at most 128 MiB above its destination, from memory too, where the images that lie there are no part of it; a
stated memory_budget holds under a limit of the budget + 64 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peers
from control_group import Group, NoControlGroups, group
from harness import GIB, Result, arguments, drop_cache, leaf_items, make_state, median_interval, note, report, workplace
from memory_contenders import FILES, FROM_MEMORY, LEAVE, LOADS, MIB, OURS, SAVES, TIER, saving, work

import tenuto
from tenuto.engine.staging import slots

SPARE = 64 * MIB
RESTORE_SPARE = 128 * MIB
BUDGET = 256 * MIB
ROUNDS = 2


def child_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shared-memory", default=slots.SHARED_MEMORY, help="where images lie (default %(default)s)")


def words(what: str, where: Path, options: argparse.Namespace) -> list[str]:
    """The command of a child."""
    found = [sys.executable, __file__, "--child", what, "--at", str(where)]
    return [
        *found,
        "--gib",
        str(options.gib),
        "--leaves",
        str(options.leaves),
        "--shared-memory",
        options.shared_memory,
    ]


def leave_images(ours: Group, where: Path, options: argparse.Namespace) -> None:
    """A training lives and dies in this group; what it had in memory stays."""
    done = subprocess.run(
        words(LEAVE, where, options), stderr=subprocess.DEVNULL, preexec_fn=lambda: ours.enter(os.getpid()), check=False
    )
    assert done.returncode == -signal.SIGKILL, f"{LEAVE} ended with {done.returncode}"


@contextlib.contextmanager
def child(ours: Group, what: str, where: Path, options: argparse.Namespace, budget: int | None) -> Iterator[Any]:
    command = [*words(what, where, options), *(["--budget", str(budget)] if budget is not None else [])]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: ours.enter(os.getpid()),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        for pid in (ours.path / "cgroup.procs").read_text(encoding="ascii").split():
            os.kill(int(pid), 9)  # what the child began, dcp's own process among them: all of this group is ours


def measure(
    what: str, where: Path, options: argparse.Namespace, *, room: int | None = None, budget: int | None = None
) -> dict[str, Any]:
    """Peaks above what the group held before, and how it ended. room: bytes above that, as a hard limit."""
    with group() as ours:
        if what == FROM_MEMORY:
            leave_images(ours, where, options)
        try:
            return measure_in(ours, what, where, options, room=room, budget=budget)
        finally:
            clear(Path(options.shared_memory))


def measure_in(
    ours: Group,
    what: str,
    where: Path,
    options: argparse.Namespace,
    *,
    room: int | None = None,
    budget: int | None = None,
) -> dict[str, Any]:
    with child(ours, what, where, options, budget) as process:
        assert process.stdout.readline() == "ready\n", f"{what} did not get ready"
        held, usage = ours.held, ours.usage
        with ours.watched() as watch:
            if room is not None:
                # What the training itself holds, its code and page cache included, is not to be squeezed out for room.
                ours.limit(usage + room)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("go\n")
                process.stdin.flush()
            said = process.stdout.readline().strip()
        killed = ours.kills > 0
        return {
            "held": watch.held - held,
            "usage": watch.usage - usage,
            "ended": "killed" if killed else said or "ended without a word",
            "version": ours.version,
        }


def clear(shared_memory: Path) -> None:
    """What contenders have left in shared memory, which is a directory of this run."""
    for path in shared_memory.iterdir():
        shutil.rmtree(path)


def charged(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """MiB of shared memory in the group of an owner that has died, and in that of another that restores from it."""
    where = prepare(FROM_MEMORY, place, options)
    with group("owner") as owner, group("reader") as reader:
        leave_images(owner, where, options)
        after_death = owner.shared
        found = measure_in(reader, FROM_MEMORY, where, options)
        assert found["ended"] == "done", found["ended"]
        told = {"after_death": after_death, "after_the_restore": owner.shared, "reader_at_most": found["held"]}
        clear(Path(options.shared_memory))
    return {name: round(nbytes / MIB, 1) for name, nbytes in told.items()}


def prepare(what: str, place: Path, options: argparse.Namespace) -> Path:
    """Where `what` saves to (absent), or what it reads (there, and not in the page cache)."""
    if what == FROM_MEMORY:
        for name in (FILES[what], f"{FILES[what]}-warm"):
            shutil.rmtree(place / name, ignore_errors=True)
        return place / FILES[what]
    if what in LOADS:
        drop_cache(place / FILES[what])
        return place / FILES[what]
    for name in ("saved", "saved-warm"):
        path = place / name
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    return place / "saved"


def write_files(place: Path, options: argparse.Namespace) -> None:
    for suffix, gib, leaves in (("", options.gib, options.leaves), ("-warm", 2 * MIB / GIB, 2)):
        state = make_state(gib, leaves)
        tenuto.save(state, place / f"ours{suffix}")
        peers.torch_save(state, place / f"state.pt{suffix}")
        peers.safetensors_save(state["model"], place / f"state.safetensors{suffix}")
        (place / f"dcp{suffix}").mkdir()
        peers.dcp_save(state, place / f"dcp{suffix}")


def measure_all(place: Path, options: argparse.Namespace, nbytes: int) -> Result:
    result = Result("p8_memory", {}, nbytes, sized=True)
    limited: dict[str, Any] = {}
    for turn in range(options.rounds or ROUNDS):
        for what in (*SAVES, *LOADS):
            found = measure(what, prepare(what, place, options), options)
            assert found["ended"] == "done", f"{what}: {found['ended']}"
            result.memory.setdefault(f"{what}: held", []).append(found["held"])
            result.memory.setdefault(f"{what}: with page cache", []).append(found["usage"])
            result.facts["control_groups"] = f"version {found['version']}"
        note(f"round {turn + 1} of {options.rounds or ROUNDS}")
    for what in (*SAVES, *LOADS):
        room = states_of(what) * nbytes + SPARE if what in SAVES else RESTORE_SPARE
        found = measure(what, prepare(what, place, options), options, room=room)
        limited[what] = {"limit_mib_above_training": room // MIB, "ended": found["ended"]}
    note("under limits")
    budget = min(BUDGET, nbytes // 2 // MIB * MIB)
    found = measure(OURS[0], prepare(OURS[0], place, options), options, room=budget + SPARE, budget=budget)
    limited[f"{OURS[0]}, memory_budget of {budget // MIB} MiB"] = {
        "limit_mib_above_training": (budget + SPARE) // MIB,
        "ended": found["ended"],
        "held_mib": round(found["held"] / MIB, 1),
    }
    result.facts["under_a_hard_limit"] = limited
    result.facts["images_charged_mib"] = charged(place, options)
    return result


def states_of(what: str) -> int:
    """How many states' sizes a save may take."""
    return 2 if what == TIER else 1


def judge(result: Result, nbytes: int) -> None:
    for what, text, above in (
        (OURS[0], "save, memory above the training's own <= state + 64 MiB", nbytes + SPARE),
        (
            TIER,
            "save with the memory tier, memory above the training's own <= 2 states + 64 MiB",
            states_of(TIER) * nbytes + SPARE,
        ),
        (OURS[2], "restore, memory above the destination <= 128 MiB", RESTORE_SPARE),
        (FROM_MEMORY, "restore from memory, memory above the destination <= 128 MiB", RESTORE_SPARE),
    ):
        found = median_interval([value / MIB for value in result.memory[f"{what}: held"]])
        result.judge_value(f"{text} ({above // MIB} MiB)", found, at_most=above / MIB, unit="mib")
    for what, found_under in result.facts["under_a_hard_limit"].items():
        if "tenuto" in what:
            survived = 1.0 if found_under["ended"] == "done" else 0.0
            text = f"{what}: done under a hard limit of {found_under['limit_mib_above_training']} MiB above training"
            result.judge_value(text, (survived, survived, survived), at_least=1.0, unit="done")


def fall_back(options: argparse.Namespace, why: str) -> None:
    note(f"P8 not measured: {why}.")
    note("It needs root, or a memory control group that was delegated to this user: the peak of a group is the figure.")
    note(f"This process alone, by VmHWM, with a state of {options.gib:g} GiB (a hint, no result):")
    state = make_state(options.gib, options.leaves)
    before = _high_water()
    with workplace(options) as place:
        saving(OURS[0], state, place / "saved", None)()
    note(f"  a save took at most {(_high_water() - before) / MIB:,.0f} MiB above the state")


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def shared_memory(options: argparse.Namespace) -> Iterator[None]:
    """A directory of this run for the images, instead of the one that belongs to all trainings; gone afterwards."""
    options.shared_memory = tempfile.mkdtemp(prefix="tenuto-p8-", dir=options.shared_memory)
    try:
        yield
    finally:
        shutil.rmtree(options.shared_memory, ignore_errors=True)


def main() -> None:
    options = arguments(__doc__ or "", add=child_options)
    if options.child:
        work(options)
    try:
        with group():
            pass
    except NoControlGroups as error:
        fall_back(options, str(error))
        return
    with workplace(options) as place, shared_memory(options):
        write_files(place, options)
        nbytes = leaf_items(options.gib, options.leaves) * options.leaves * 4
        begun = time.perf_counter()
        result = measure_all(place, options, nbytes)
        result.facts["measured_in_s"] = round(time.perf_counter() - begun)
        judge(result, nbytes)
        report(result, options, place)


if __name__ == "__main__":
    main()
