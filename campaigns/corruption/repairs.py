"""Damage that has to be repaired: `python -m campaigns.corruption --repair`.

Small repositories in every kind of redundancy there is are damaged (a flipped bit, a zeroed sector, a truncation, a
deletion, another object's bytes), in one object or several, in one place or several, and repaired. What a repair calls
whole is so, bit for bit; what it cannot repair is noted as damaged and never called whole; nothing else changes. Where
the damage is in one place alone and another one has everything, all has to be whole again.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

import tenuto
from tenuto.cli import main as command
from tenuto.codec import choosing
from tenuto.engine.memory_tier.listing import dead_images, remove_image
from tenuto.engine.staging import slots
from tenuto.errors import TenutoError
from tenuto.maintenance.gc import execute as execute_gc
from tenuto.maintenance.gc import plan_gc
from tenuto.maintenance.repair import RepairReport, execute
from tenuto.maintenance.repair_plan import plan_repair
from tenuto.maintenance.repair_sources import Sources
from tenuto.maintenance.verify import execute as execute_verify
from tenuto.maintenance.verify import plan_verify
from tenuto.model.ids import CheckpointId
from tenuto.policy import every, keep
from tenuto.policy.encoding import Encoding
from tenuto.ranks.kv.in_process import InProcessKVStore, ThreadRanks
from tenuto.repo.format.object_names import is_staged
from tenuto.repo.notes import notes, verification_of
from tenuto.repo.repository import Repo
from tenuto.store.contract import Bytes, Store
from tenuto.store.local.store import LocalStore
from tenuto.store.registry import open_store

CHUNK: Final = 512
STEPS: Final = 3
State = dict[str, Any]


@dataclass
class Redundancy:
    """One repository. places: directories that it lies in, the primary first; sources: of other copies, for `--from`.
    full: whether one place alone can be damaged in any way without a loss. states: by step. lies: whether what a repair
    puts there arrives altered."""

    name: str
    places: list[Path]
    full: bool
    sources: list[Path] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)
    objects: dict[Path, bytes] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    """The directories of the checkpoints that a repair looks at: not of what lies in the trash for nobody."""
    lies: bool = False

    @property
    def primary(self) -> Path:
        return self.places[0]


def state_of(step: int, source: np.random.Generator) -> State:
    return {
        "weights": source.random(700, np.float32),
        "moments": {"exp": source.random(400), "count": np.array(step, np.int64)},
        "rounded": (np.arange(900) // 7 + step).astype(np.uint16),
        "rate": 0.1,
    }


def _train(made: Redundancy, where: Any, source: np.random.Generator, *, steps: int = STEPS, **settings: Any) -> None:
    """Saves `steps` checkpoints, of which one tensor never changes."""
    frozen = source.random(1500, np.float32)
    state = {**state_of(0, source), "frozen": frozen}
    settings = {"keep": keep.all(), **settings}
    with tenuto.Checkpointer(where, state, save=every(steps=1), on_error="raise", **settings) as ckpt:
        for step in ckpt.steps(steps):
            new = state_of(step + 1, source)
            state["weights"][:], state["rounded"][:] = new["weights"], new["rounded"]
            state["moments"]["exp"][:] = new["moments"]["exp"]
            state["moments"]["count"][...] = step + 1
            made.states[step + 1] = {
                "weights": state["weights"].copy(),
                "moments": {"exp": state["moments"]["exp"].copy(), "count": np.array(step + 1)},
                "rounded": state["rounded"].copy(),
                "rate": 0.1,
                "frozen": frozen,
            }


def _keyed(one: Redundancy, root: Path) -> AbstractContextManager[Any]:
    """Gives the key to whoever reads what is sealed, and to nobody else: a key for what is not sealed is an error."""
    return mock.patch.dict(os.environ, {"TENUTO_KEY_FILE": str(root / "key")} if one.name == "sealed" else {})


def _created(place: Path) -> Store:
    store = open_store(place)
    Repo.create_or_open(store, chunk_bytes=CHUNK)
    return store


def _copy(root: Path, source: np.random.Generator) -> Redundancy:
    made = Redundancy("copy", [root / "home"], full=True)
    _train(made, _created(root / "home"), source)
    tenuto.Repository(root / "home").replicate(root / "copy")
    return made


def _backup(root: Path, source: np.random.Generator) -> Redundancy:
    made = Redundancy("backup", [root / "home"], full=True, sources=[root / "backup"])
    _train(made, _created(root / "home"), source)
    for value in (0.5, 0.25):
        tenuto.Repository(root / "home").add_metrics(2, {"val_loss": value})
    shutil.copytree(root / "home", root / "backup")
    return made


def _mirror(root: Path, source: np.random.Generator) -> Redundancy:
    made = Redundancy("mirror", [root / "one", root / "two"], full=True)
    _created(root / "one")
    _train(made, tenuto.Mirror(root / "one", root / "two"), source)
    return made


def _tiers(root: Path, source: np.random.Generator) -> Redundancy:
    made = Redundancy("tiers", [root / "fast", root / "slow"], full=True)
    _created(root / "fast")
    _train(made, tenuto.Tiers(tenuto.Tier(root / "fast"), tenuto.Tier(root / "slow")), source)
    return made


def _followed(root: Path, source: np.random.Generator) -> Redundancy:
    """A tier keeps what the primary has only in its trash, for the data files that its newest one needs."""
    made = Redundancy("followed", [root / "home", root / "slow"], full=True)
    _created(root / "home")
    tiers = tenuto.Tiers(tenuto.Tier(root / "home", keep=keep.latest(1)), tenuto.Tier(root / "slow", keep=keep.all()))
    _train(made, tiers, source, encoding="dedupe")
    return made


def _set_back(root: Path, source: np.random.Generator) -> Redundancy:
    """The same, and then the primary was set back and has trained on alone: under the same numbers its tier has another
    line of training, of which the primary has the bases in its trash as well."""
    made = Redundancy("set back", [root / "home", root / "slow"], full=False)
    _created(root / "home")

    def both() -> tenuto.Tiers:
        return tenuto.Tiers(tenuto.Tier(root / "home"), tenuto.Tier(root / "slow"))

    _train(made, both(), source, encoding="dedupe", steps=1)
    shutil.copytree(root / "home", root / "earlier")
    _train(made, both(), source, encoding="dedupe")
    shutil.rmtree(root / "home")
    (root / "earlier").rename(root / "home")
    made.states.clear()
    _train(made, root / "home", source, encoding="dedupe", keep=keep.latest(1))
    return made


def _lying(root: Path, source: np.random.Generator) -> Redundancy:
    made = Redundancy("lying", [root / "home"], full=False, sources=[root / "backup"], lies=True)
    _train(made, _created(root / "home"), source)
    shutil.copytree(root / "home", root / "backup")
    return made


def _nodes(root: Path, source: np.random.Generator) -> Redundancy:
    made = Redundancy("nodes", [root / "home", root / "node"], full=True)
    _created(root / "home")
    _train(made, tenuto.PerNode(root / "node", home=root / "home", copies=2), source)
    return made


def _without_copies(root: Path, source: np.random.Generator) -> Redundancy:
    """No copy at all: what never changes lies in every checkpoint."""
    made = Redundancy("neighbours", [root / "home"], full=False)
    _train(made, _created(root / "home"), source)
    return made


def _encoded(root: Path, source: np.random.Generator) -> Redundancy:
    """Chains of differences, and chunks in data files of other checkpoints, with a backup of the directory."""
    made = Redundancy("encoded", [root / "home"], full=True, sources=[root / "backup"])
    with mock.patch.object(choosing, "SMALLEST_BYTES", 0):
        _train(made, _created(root / "home"), source, encoding=Encoding(delta=8), steps=4)
    shutil.copytree(root / "home", root / "backup")
    return made


def _sealed(root: Path, source: np.random.Generator) -> Redundancy:
    made = Redundancy("sealed", [root / "home"], full=True, sources=[root / "backup"])
    _created(root / "home")
    key = root / "key"
    with suppress(SystemExit), mock.patch("sys.stdout"), mock.patch("sys.stderr"):
        command(["key", "add", str(root / "home"), "--key-file", str(key)])
    _train(made, root / "home", source, key=key)
    shutil.copytree(root / "home", root / "backup")
    return made


def _memory(root: Path, source: np.random.Generator) -> Redundancy:
    """The last checkpoint lies in memory too, where the process that saved it left it when it was killed."""
    made = Redundancy("memory", [root / "home"], full=False)
    _created(root / "home")
    child = os.fork()
    if child == 0:
        state = {**state_of(0, source), "frozen": source.random(1500, np.float32)}
        with suppress(BaseException):
            ckpt = tenuto.Checkpointer(
                root / "home", state, save=every(steps=1), memory=every(steps=1), keep=keep.all()
            )
            for step in ckpt.steps(9):
                ckpt.wait()
                if step == STEPS:
                    os._exit(0)
                state["weights"] += np.float32(1)
        os._exit(1)
    os.waitpid(child, 0)
    made.states = {step: dict(tenuto.load(root / "home", step=step).state) for step in range(1, STEPS + 1)}
    return made


def _ranks(root: Path, source: np.random.Generator) -> Redundancy:
    """Two ranks that share what both hold, mirrored."""
    import threading

    made = Redundancy("ranks", [root / "one", root / "two"], full=True)
    _created(root / "one")
    board, seed = InProcessKVStore(), int(source.integers(1 << 30))
    failed: list[BaseException] = []

    def rank(number: int) -> None:
        own = np.random.default_rng(seed)
        rows = own.random((8, 90), np.float32)
        part = rows[number * 4 : number * 4 + 4].copy()
        state = {
            "rows": tenuto.shard(part, whole=(8, 90), offsets=(number * 4, 0)),
            "bias": own.random(300),
            "rate": 0.1,
        }
        try:
            where = tenuto.Mirror(root / "one", root / "two")
            tenuto.save(state, where, step=1, ranks=ThreadRanks(number, 2, board))
            made.states[1] = {"rows": rows, "bias": state["bias"], "rate": 0.1}
        except BaseException as error:  # noqa: BLE001 - a thread's exception would reach nobody
            failed.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return made


REDUNDANCIES: Final[Mapping[str, Callable[[Path, np.random.Generator], Redundancy]]] = {
    "copy": _copy,
    "backup": _backup,
    "mirror": _mirror,
    "tiers": _tiers,
    "nodes": _nodes,
    "ranks": _ranks,
    "neighbours": _without_copies,
    "encoded": _encoded,
    "sealed": _sealed,
    "memory": _memory,
    "followed": _followed,
    "set back": _set_back,
    "lying": _lying,
}

# --------------------------------------------------------------------------------------------------
# Damage.

Change = Callable[[bytes, random.Random, list[bytes]], bytes | None]


def _flip(data: bytes, source: random.Random, others: list[bytes]) -> bytes:
    at = source.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << source.randrange(8)]) + data[at + 1 :]


def _zero(data: bytes, source: random.Random, others: list[bytes]) -> bytes:
    at = source.randrange(len(data)) // 512 * 512
    return data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]


def _truncate(data: bytes, source: random.Random, others: list[bytes]) -> bytes:
    return data[: source.randrange(len(data))]


def _other(data: bytes, source: random.Random, others: list[bytes]) -> bytes:
    return source.choice(others) if others else data[::-1]


CHANGES: Final[Mapping[str, Change]] = {
    "bit flip": _flip,
    "sector zeroed": _zero,
    "truncated": _truncate,
    "another object": _other,
    "deleted": lambda data, source, others: None,
}


@dataclass
class RepairTally:
    cases: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    """Damaged objects, by redundancy, kind of object and damage."""
    repaired: int = 0
    quarantined: int = 0
    violations: list[str] = field(default_factory=list)
    by: dict[str, Counter[str]] = field(default_factory=dict)
    """By redundancy: cases, repaired objects, quarantined checkpoints."""

    def json(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "struck": sum(self.struck.values()),
            "repaired": self.repaired,
            "quarantined": self.quarantined,
            "violation_count": len(self.violations),
            "violations": self.violations[:100],
            "by_redundancy": {name: dict(sorted(found.items())) for name, found in sorted(self.by.items())},
            "by_damage": dict(sorted(self.struck.items())),
        }


def build(name: str, root: Path, seed: int) -> Redundancy:
    made = REDUNDANCIES[name](root, np.random.default_rng(seed))
    # One attempt of each is over, and nothing of it is going to change by itself.
    made.objects = {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
    repo = Repo.open(open_store(made.primary), report=lambda message: None)
    with _keyed(made, root), Sources.of(repo, made.sources) as sources:
        made.checked = {id.directory for id in plan_repair(sources).checked}
    return made


def run_repairs(
    cases: int,
    seed: int,
    *,
    seconds: float | None = None,
    names: tuple[str, ...] = tuple(REDUNDANCIES),
    log: Callable[[str], None],
    until_broken: bool = False,
) -> RepairTally:
    """Judges `cases` cases in turn over the redundancies, or as many as there is time for, or until one is a
    violation."""
    tally, source, began = RepairTally(), random.Random(f"repairs {seed}"), time.monotonic()
    with workplace() as root:
        made = {name: build(name, root / name, seed + number) for number, name in enumerate(names)}
        while tally.cases < cases and (seconds is None or time.monotonic() - began < seconds):
            one = made[names[tally.cases % len(names)]]
            strike(one, root / one.name, source, tally)
            tally.cases += 1
            if until_broken and tally.violations:
                break
            if not tally.cases % 50:
                log(f"{tally.cases:,} cases, {tally.repaired:,} objects repaired, {len(tally.violations)} violations")
    return tally


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory in memory, with shared memory of its own for images, and state of its own for verifications."""
    with ExitStack() as stack:
        within = "/dev/shm" if os.path.isdir("/dev/shm") else None
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tenuto-repairs-", dir=within)))
        (root / "shm").mkdir(mode=0o700)
        stack.enter_context(mock.patch.object(slots, "SHARED_MEMORY", str(root / "shm")))
        stack.enter_context(mock.patch.dict(os.environ, {"XDG_STATE_HOME": str(root / "state")}))
        yield root
        for image in dead_images():
            remove_image(image.slot)


def strike(one: Redundancy, root: Path, source: random.Random, tally: RepairTally) -> None:
    """Damages some objects, repairs, judges, and puts everything back."""
    count = source.choice((1, 1, 1, 2, 3, 6))
    # In one place all can be lost where another has everything; more than one place is anybody's guess.
    alone = source.random() < 0.7
    place = source.choice(one.places)
    found = [
        path
        for path in one.objects
        if any(path.is_relative_to(other) for other in ([place] if alone else one.places)) and _kind(path)
        if _kind(path) == "attempt" or any(f"/{directory}/" in str(path) for directory in one.checked)
    ]
    struck: dict[Path, str] = {}
    for path in source.sample(found, min(count, len(found))):
        kind = _kind(path)
        change = source.choice(list(CHANGES))
        if change == "deleted" and _is_a_removal(one, path, kind):
            continue
        beside = {"manifest": "begin.json", "begin": "manifest.json"}.get(kind)
        if beside is not None and path.with_name(beside) in struck:
            continue  # a directory of which both were another's was copied there, and is no checkpoint
        others = [
            data
            for other, data in one.objects.items()
            if _kind(other) == kind and data != one.objects[path] and _within(one, other) != _within(one, path)
        ]
        data = CHANGES[change](one.objects[path], source, others)
        if data == one.objects[path]:
            continue
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        struck[path] = change
        tally.struck[f"{one.name}, {kind}, {change}"] += 1
    try:
        with _keyed(one, root):
            problems = list(_judge(one, root, struck, alone=alone, tally=tally))
    finally:
        _heal(one, root)
    words = ", ".join(f"{path.relative_to(root)} {change}" for path, change in struck.items())
    tally.violations += [f"{one.name} case {tally.cases}: {words}: {problem}" for problem in problems]


def _within(one: Redundancy, path: Path) -> Path:
    """What an object is called in its place."""
    return next((path.relative_to(place) for place in one.places if path.is_relative_to(place)), path)


def _is_a_removal(one: Redundancy, path: Path, kind: str) -> bool:
    """Returns whether deleting a file is what somebody may do: then nothing has to bring it back."""
    if path.is_relative_to(one.primary) and kind == "note":
        return True
    # Tiers and nodes keep what they like of what another place has; `tenuto replicate` brings what they lack.
    followed = one.name in ("tiers", "followed", "set back")
    return ((followed or one.name == "nodes") and kind == "pack") or (followed and path.is_relative_to(one.places[1]))


def _kind(path: Path) -> str:
    """What of a checkpoint a file is; empty for what is not struck."""
    if path.name in ("manifest.json", "begin.json", "attempt.json"):
        return path.name.removesuffix(".json")
    if path.suffix == ".index":
        return "index"
    return "pack" if path.suffix in (".safetensors", ".pack") else "note" if path.parent.name == "notes" else ""


def _heal(one: Redundancy, root: Path) -> None:
    for path in sorted(root.rglob("*")):
        if path.is_file() and path not in one.objects:
            path.unlink()
    for path, data in one.objects.items():
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _judge(
    one: Redundancy, root: Path, struck: Mapping[Path, str], *, alone: bool, tally: RepairTally
) -> Iterator[str]:
    repo = Repo.open(open_store(one.primary), report=lambda message: None)
    if any(_kind(path) == "manifest" and path.is_relative_to(one.primary) and not path.exists() for path in struck):
        # Whoever has no room left asks for all that nothing needs, before anybody looks for damage.
        freed = execute_gc(repo, plan_gc(repo, now=True)).deleted
        if freed:
            yield f"gc has freed {', '.join(map(str, freed))}, of which the manifest alone was missing"
            return
    try:
        with Sources.of(repo, one.sources) as sources:
            plan = plan_repair(sources)
            with _altered_on_the_way() if one.lies else nullcontext():
                report = execute(sources, plan)
    except TenutoError as error:
        yield f"the repair raises {type(error).__name__}: {error}"
        return
    counts = tally.by.setdefault(one.name, Counter())
    counts["cases"] += 1
    counts["objects repaired"] += len(report.repaired)
    counts["checkpoints quarantined"] += len(report.quarantined)
    counts["objects struck"] += len(struck)
    tally.repaired += len(report.repaired)
    tally.quarantined += len(report.quarantined)
    changed = [path for path, data in one.objects.items() if not path.exists() or path.read_bytes() != data]
    if one.name in ("followed", "set back"):  # where no copy has it, what begins a save is made anew from what it wrote
        again = {Path(mended.place) / mended.name for mended in report.repaired}
        changed = [path for path in changed if _kind(path) != "begin" or path not in struck or path not in again]
    if one.name == "memory":  # a manifest out of an image tells of other times than the one in the store
        changed = [path for path in changed if _kind(path) != "manifest" or path not in struck or not report.ok]
    for mended in report.repaired:
        path = Path(mended.place) / mended.name
        if path in changed and path in one.objects:
            yield f"{path.relative_to(root)} counts as repaired, and is not what was saved"
    for path in changed:
        if path not in struck:
            yield f"{path.relative_to(root)} was healthy, and is changed"
    if not one.lies and any(".part-" in path.name or ".tmp-" in path.name for path in root.rglob("*")):
        yield "something staged is left"
    if one.full and alone and (changed or not report.ok):
        where = ", ".join(str(path.relative_to(root)) for path in changed)
        yield f"not whole again, although another place has everything: {where or report}"
    yield from _claims(one, repo, report, [path for path in changed if path.is_relative_to(one.primary)])
    yield from _contents(one)


@contextmanager
def _altered_on_the_way() -> Iterator[None]:
    """What a repair puts under the name of an object arrives with another last byte, and the store says nothing."""
    put = LocalStore.put_if_absent

    def altering(store: LocalStore, name: str, content: Any, *, token: str) -> Any:
        if token.startswith("repair-") and not is_staged(name) and not name.startswith("trash/"):
            data = bytearray(b"".join(bytes(piece) for piece in content.pieces()))
            data[-1] ^= 1
            content = Bytes(bytes(data))
        return put(store, name, content, token=token)

    with mock.patch.object(LocalStore, "put_if_absent", altering):
        yield


def _claims(one: Redundancy, repo: Repo, report: RepairReport, changed: list[Path]) -> Iterator[str]:
    """What a repair says of checkpoints that are not whole."""
    lost = {quarantined.id for quarantined in report.quarantined}
    if changed and report.ok:
        yield f"it calls everything whole, and {changed[0].name} is not"
    again = execute_verify(repo, plan_verify(repo))
    for step in one.states:
        id = next((found for found in _ids(repo) if found.step == step), None)
        if id is None:
            continue
        state = verification_of(notes(repo, id))
        if id in again.damaged() and (id not in lost or state != "suspect"):
            yield f"{id} cannot be restored, and is not quarantined ({state or 'no note'})"
        if id not in again.damaged() and state == "suspect":
            yield f"{id} is noted as damaged, and is whole"


def _ids(repo: Repo) -> list[CheckpointId]:
    runs = [(run, attempt) for run in repo.runs() for attempt in repo.attempts(run)]
    return [CheckpointId(run, attempt, step) for run, attempt in runs for step in repo.committed(run, attempt)]


def _contents(one: Redundancy) -> Iterator[str]:
    """Each checkpoint gives what was saved, or refuses."""
    for step, state in one.states.items():
        try:
            found = tenuto.load(one.primary, step=step).state
        except TenutoError:
            continue
        if not _same(found, state):
            yield f"step {step} gives other values"


def _same(found: Any, state: Any) -> bool:
    if isinstance(state, dict):
        return found.keys() == state.keys() and all(_same(found[name], value) for name, value in state.items())
    if isinstance(state, np.ndarray):
        return bool(np.asarray(found).tobytes() == state.tobytes())
    return bool(found == state)
