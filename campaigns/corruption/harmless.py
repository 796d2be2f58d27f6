"""Changes that harm nothing: strangers' files, copies, temporaries, and what a living repository does by itself.

After each of them every checkpoint reads as before, and verify finds no error (things worth a look may be shown).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Final

from campaigns.corruption.judge import Reading
from campaigns.corruption.shapes import Shape, repeatable
from campaigns.recorded_jobs import Faster, save_stages
from tenuto.engine.read.choose import restore_latest
from tenuto.errors import TenutoError
from tenuto.maintenance.verify import execute, plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.repo.format import object_names
from tenuto.repo.format.object_names import parse_numbered
from tenuto.repo.format.small_records import LeaseRecord, decode_lease, encode_lease
from tenuto.repo.notes import add_note
from tenuto.repo.ownership.claim import claim
from tenuto.repo.ownership.owner_watch import OwnerWatch
from tenuto.repo.refs import clear_ref, put_ref
from tenuto.repo.tombstones import put_tombstone, take_back

Change = Callable[[Shape, random.Random], str]


def _stranger(shape: Shape, source: random.Random) -> str:
    directories = sorted({name.rpartition("/")[0] for name in shape.objects})
    file = source.choice(("README.txt", ".DS_Store", "manifest.json.bak", "01.json", "0.json", "x.index", "a/b/c", "1"))
    name = f"{source.choice(directories)}/{file}".lstrip("/")
    shape.place.objects.setdefault(name, (source.randbytes(source.randrange(200)), 2))
    return f"a stranger's {name}"


def _temporary(shape: Shape, source: random.Random) -> str:
    name = f"{source.choice(sorted(shape.objects))}.tmp-{source.randbytes(8).hex()}"
    shape.place.objects[name] = source.randbytes(source.randrange(300)), 2
    return f"the temporary {name}"


def _copy(shape: Shape, source: random.Random) -> str:
    """A person copies a step's, an attempt's or a run's directory beside itself."""
    parts = source.choice([name for name in sorted(shape.objects) if name.startswith("runs/")]).split("/")
    depth = source.choice((2, 3, 4)) if len(parts) > 4 else 2
    old = "/".join(parts[:depth])
    number = source.randrange(900, 999)
    new = "/".join([*parts[: depth - 1], (f"copy{number}", f"a{number:04d}", f"step-{number:08d}")[depth - 2]])
    for name in [name for name in shape.objects if name.startswith(f"{old}/")]:
        shape.place.objects[new + name[len(old) :]] = shape.objects[name], 2
    return f"{old} copied to {new}"


def _beat(shape: Shape, source: random.Random) -> str:
    """The owner's next beat: one more object, the one before the last goes."""
    beats = [name for name in sorted(shape.objects) if "/lease/" in name]
    name = source.choice(beats)
    directory, _, file = name.rpartition("/")
    run, attempt = directory.split("/")[1], int(directory.split("/")[2][1:])
    last = max(parse_numbered(other.rpartition("/")[2]) or 0 for other in beats if other.startswith(f"{directory}/"))
    was = decode_lease(shape.objects[object_names.numbered(directory, last)], run, attempt, last, shape.repo.id)
    beat = LeaseRecord(last + 1, was.id, was.parent, was.closed, source.random() < 0.5)
    data = encode_lease(beat, run, attempt, shape.repo.id)
    shape.place.objects[object_names.numbered(directory, last + 1)] = data, 2
    shape.place.objects.pop(object_names.numbered(directory, last - 1), None)
    return f"the lease of {run}, attempt {attempt}, moved on from {file}"


def _note(shape: Shape, source: random.Random) -> str:
    id = source.choice(sorted(shape.saved))
    if not shape.repo.store.children(object_names.tombstone_directory(id)).objects:
        add_note(shape.repo, id, source.choice(("metric", "verified")), {"value": source.random()})
    return f"a note on {id}"


def _ref(shape: Shape, source: random.Random) -> str:
    free = [
        id for id in sorted(shape.saved) if not shape.repo.store.children(object_names.tombstone_directory(id)).objects
    ]
    kind, name = source.choice(("tag", "hold")), source.choice(("best", "new"))
    for _ in range(source.randrange(1, 4)):
        if source.random() < 0.7:
            put_ref(shape.repo, "tag" if kind == "tag" else "hold", name, source.choice(free))
        else:
            clear_ref(shape.repo, "tag" if kind == "tag" else "hold", name)
    return f"{kind} {name} moved"


def _removing(shape: Shape, source: random.Random) -> str:
    """A removal announced, and perhaps called off."""
    id = source.choice(sorted(shape.saved))
    stone = put_tombstone(shape.repo, id, reason="rm")
    if source.random() < 0.5:
        take_back(shape.repo, stone)
    return f"the removal of {id} announced"


def _training_goes_on(shape: Shape, source: random.Random) -> str:
    """The next process claims a run, and may be in the middle of a save."""
    run = source.choice(sorted(shape.line))
    with repeatable(source.randrange(10**6)):
        watch = OwnerWatch(shape.repo, run, clock=Faster().clock())
        attempt = claim(shape.repo, run, shape.line[run][0], wait_s=0.0, observe=watch)
        id = CheckpointId(run, attempt.number, shape.line[run][0].step + 1)
        for _, _stage in zip(
            range(source.randrange(4)),
            save_stages(shape.repo, attempt, id, {"x": 1.0}, source.randbytes(16).hex()),
            strict=False,
        ):
            pass
        attempt.release()
    return f"{run} is claimed anew"


CHANGES: Final[Mapping[str, Change]] = {
    "a stranger's file": _stranger,
    "a temporary": _temporary,
    "a copied directory": _copy,
    "a lease that moved": _beat,
    "a note added": _note,
    "a ref moved": _ref,
    "a removal announced": _removing,
    "a run claimed anew": _training_goes_on,
}


def unharmed(shape: Shape, kind: str, source: random.Random) -> list[str]:
    """Makes one such change and puts all back; what was taken for damage, or read otherwise."""
    try:
        what = CHANGES[kind](shape, source)
        return [f"{what}: {problem}" for problem in false_alarms(shape)]
    finally:
        shape.heal()


def false_alarms(shape: Shape) -> list[str]:
    """Errors that verify finds in a store that is whole, and runs that do not read as they were saved."""
    problems = []
    report = execute(shape.repo, plan_verify(shape.repo))
    problems += [str(finding) for finding in report.errors]
    if set(report.checked) != set(shape.saved):
        problems.append(f"verified {[str(id) for id in report.checked]}")
    for run, line in shape.line.items():
        reading = Reading()
        try:
            result = restore_latest(shape.repo, run, reading.match)
        except TenutoError as error:
            problems.append(f"{run} cannot be read: {error}")
            continue
        if result is None or result.id != line[0] or result.skipped:
            problems.append(f"{run} reads as {result and result.id}")
        else:
            problems += reading.differences(shape, result)
    return problems
