"""Forgeries in a sealed repository, by somebody who can write to its store and has no key.

What he puts is made as well as it can be without the key: by Tenuto itself, in a copy of the repository from which he
has taken `keys/`, under the right names, with digests that fit. Whoever reads with the key gets values that a holder of
the key has saved under that step, or an error; a tag leads where its holder has put it; retention keeps what the
holder's metrics say; and `verify` with the key does not call whole what was forged.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

import tenuto
from campaigns.simulated_processes import replacing
from tenuto.errors import KeyMissing, TenutoError
from tenuto.history import rollback
from tenuto.maintenance.retention import preview
from tenuto.maintenance.verify import execute, plan_verify
from tenuto.model import canonical_json
from tenuto.model.ids import CheckpointId
from tenuto.policy import keep
from tenuto.policy.save import every
from tenuto.repo import keys
from tenuto.repo.format import objects
from tenuto.repo.keys import change_ring, secret_from, unlock, without_code
from tenuto.repo.notes import add_note, notes, unread
from tenuto.repo.refs import put_ref
from tenuto.repo.repository import Repo, now_text
from tenuto.repo.tombstones import put_tombstone
from tenuto.seal.keys import RepositoryKeys, first_ring, new_slot
from tenuto.store.registry import open_store

RUN: Final = "main"
TAGGED, LAST, BEST = 3, 5, 4
"""Steps: the one that the holder has tagged `prod`, the newest, and the best by `loss`."""
LOSS: Final = {1: 5.0, 2: 4.0, 3: 3.0, 4: 1.0, 5: 2.0}


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(3000, float(step)), "n": step}


def poison_of(step: int) -> dict[str, Any]:
    return {"w": np.full(3000, -float(step)), "n": step}


@dataclass
class Sealed:
    """`home`: a repository with the first step plain, from before its key, and the others sealed. `forged`: what the
    attacker has made of it, whose objects lie under the names that they would have."""

    home: Path
    forged: Path
    key: Path


def _train(place: Path, values: Callable[[int], dict[str, Any]], last: int, **more: Any) -> None:
    state = values(0)
    with tenuto.Checkpointer(
        place, state, save=every(steps=1), keep=keep.all(), log="silent", on_error="raise", **more
    ) as ckpt:
        for step in ckpt.steps(last):
            state["w"][:] = values(step + 1)["w"]
            state["n"] = step + 1
            ckpt.log(loss=LOSS.get(step + 1, 0.0))


def build(root: Path) -> Sealed:
    home, key = root / "home", root / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    _train(home, state_of, 1)
    repo = Repo.open(open_store(home))
    slot = new_slot(repo.id, secret_from(key), now_text())
    change_ring(repo, lambda ring: first_ring(repo.id, slot, frozenset(without_code(repo).values())))
    plain = shutil.copytree(home, root / "plain")
    _train(home, state_of, LAST, key=key)
    repo = Repo.open(open_store(home))
    unlock(repo, key)
    put_ref(repo, "tag", "prod", CheckpointId(RUN, 2, 2))
    put_ref(repo, "tag", "prod", CheckpointId(RUN, 2, TAGGED))
    put_ref(repo, "tag", "other", CheckpointId(RUN, 2, LAST))
    add_note(repo, CheckpointId(RUN, 2, 2), "verified", {"every_byte": True})
    return Sealed(home, _forge(root, plain, home), key)


def _forge(root: Path, plain: Path, home: Path) -> Path:
    """The same steps, plain; steps, attempts, a rollback and refs that nobody has made; notes on the sealed steps."""
    shutil.rmtree(plain / "keys")
    _train(plain, poison_of, LAST + 1)
    _train(plain, poison_of, LAST + 2)
    there = shutil.copytree(home, root / "unlocked")
    shutil.rmtree(there / "keys")
    repo = Repo.open(open_store(there))
    put_ref(repo, "tag", "prod", CheckpointId(RUN, 2, LAST))
    put_ref(repo, "pin", "x", CheckpointId(RUN, 2, 2))
    add_note(repo, CheckpointId(RUN, 2, 2), "metric", {"loss": -9.0})
    add_note(repo, CheckpointId(RUN, 2, BEST), "metric", {"loss": 99.0})
    add_note(repo, CheckpointId(RUN, 2, TAGGED), "verified", {"every_byte": True})
    add_note(repo, CheckpointId(RUN, 2, BEST), "suspect", {"count": 1, "findings": ["x"]})
    plan = rollback.plan_rollback(repo, RUN, CheckpointId(RUN, 2, 2))
    rollback.execute(repo, plan)
    put_tombstone(repo, CheckpointId(RUN, 2, LAST), reason="rm")
    for path in sorted(there.rglob("*")):
        if path.is_file() and not (home / path.relative_to(there)).exists():
            theirs = root / "acts" / path.relative_to(there)
            theirs.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, theirs)
    return plain


# --------------------------------------------------------------------------------------------------
# What the attacker does. Each gets the struck copy and what was forged, and says whether verify has to tell.


Attack = Callable[[Path, Sealed, random.Random], bool]


def _put(place: Path, source: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            target = place / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def _step(number: int, attempt: int = 2) -> str:
    return f"runs/{RUN}/a{attempt:04d}/step-{number:08d}"


def _replaced(place: Path, made: Sealed, source: random.Random) -> bool:
    """A plain checkpoint in the place of a sealed one."""
    step = _step(source.choice((2, TAGGED, BEST, LAST)))
    shutil.rmtree(place / step)
    _put(place, made.forged, f"{step}/*")
    return True


def _replaced_before(place: Path, made: Sealed, source: random.Random) -> bool:
    """Another plain one in the place of the one that lay there before the key."""
    step = _step(1, 1)
    (forged := made.forged / _step(LAST)).exists()
    values = canonical_json.loads((forged / "manifest.json").read_bytes())
    for name in ("rank-00000.index", "rank-00000.safetensors"):
        data = (forged / name).read_bytes()
        (place / step / name).write_bytes(data)
    del values["digest"]
    values.update(attempt=1, step=1, path=f"{step}/manifest.json", parent=None)
    (place / step / "manifest.json").write_bytes(canonical_json.seal(values))
    return True


def _newer(place: Path, made: Sealed, source: random.Random) -> bool:
    """A newer plain one, of the sealed attempt."""
    _put(place, made.forged, f"{_step(LAST + 1)}/*")
    return True


def _newer_attempt(place: Path, made: Sealed, source: random.Random) -> bool:
    _put(place, made.forged, f"runs/{RUN}/a0003/attempt.json", f"{_step(LAST + 2, 3)}/*")
    return True


def _code_stripped(place: Path, made: Sealed, source: random.Random) -> bool:
    """A sealed manifest with the code taken off, and a metric changed."""
    path = place / _step(source.choice((2, TAGGED, BEST, LAST))) / "manifest.json"
    _rewritten(path, lambda values: (values.pop("code"), values["metrics"].update(loss=-5.0)))
    return True


def _rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = canonical_json.loads(path.read_bytes())
    values.pop("digest")
    change(values)
    path.write_bytes(canonical_json.seal(values))


def _keys_removed(place: Path, made: Sealed, source: random.Random) -> bool:
    """The whole run plain, and no keys."""
    shutil.rmtree(place / "keys")
    shutil.rmtree(place / "runs")
    _put(place, made.forged, "runs/**/*.*")
    return True


def _keys_destroyed(place: Path, made: Sealed, source: random.Random) -> bool:
    """The whole run plain, and a key ring that says that the keys were destroyed."""
    _rewritten(_ring(place), lambda values: (values.update(slots=[], older={}), values.pop("vouched")))
    shutil.rmtree(place / "runs")
    _put(place, made.forged, "runs/**/*.*")
    return True


def _ring(place: Path) -> Path:
    return max((place / "keys").iterdir())


def _listed(place: Path, made: Sealed, source: random.Random) -> bool:
    """A plain one in the place of a sealed one, and in the list of what the key vouches for."""
    _replaced(place, made, source)
    repo = Repo.open(open_store(place))
    digests = sorted({digest.hex() for digest in without_code(repo).values()})
    digests = sorted({*digests, *_digests(_ring(place))})
    _rewritten(_ring(place), lambda values: values["vouched"].update(sha256="".join(digests)))
    return False  # nothing opens any more


def _digests(ring: Path) -> Iterator[str]:
    text = canonical_json.loads(ring.read_bytes())["vouched"]["sha256"]
    yield from (text[at : at + 64] for at in range(0, len(text), 64))


def _list_removed(place: Path, made: Sealed, source: random.Random) -> bool:
    _rewritten(_ring(place), lambda values: values.pop("vouched"))
    return True


def _pack_cut(place: Path, made: Sealed, source: random.Random) -> bool:
    path = next((place / _step(source.choice((2, TAGGED, BEST, LAST)))).glob("rank-*.pack"))
    path.write_bytes(path.read_bytes()[: source.randrange(200)])
    return True


def _acts(*patterns: str, told: bool = True) -> Attack:
    def act(place: Path, made: Sealed, source: random.Random) -> bool:
        _put(place, made.home.parent / "acts", *patterns)
        return told

    return act


def _tag_replayed(place: Path, made: Sealed, source: random.Random) -> bool:
    """An older version of the tag as the newest one, and a tag's object under another tag's name."""
    old = source.choice(("prod/1.json", "other/1.json"))
    shutil.copy(place / "refs/tag" / old, place / "refs/tag/prod/3.json")
    return True


def _note_replayed(place: Path, made: Sealed, source: random.Random) -> bool:
    """What was noted of one checkpoint, noted of another, with everything made to fit but the code."""
    note = place / _step(TAGGED) / "notes/1.json"
    note.parent.mkdir(exist_ok=True)
    shutil.copy(place / _step(2) / "notes/1.json", note)
    name = str(note.relative_to(place))
    _rewritten(note, lambda values: values.update(path=name))
    return True


def _manifest_replayed(place: Path, made: Sealed, source: random.Random) -> bool:
    """The sealed objects of an older step under the names of a newer one."""
    old, new = _step(2), _step(source.choice((TAGGED, LAST)))
    shutil.rmtree(place / new)
    shutil.copytree(place / old, place / new)
    _rewritten(place / new / "manifest.json", lambda values: values.update(path=f"{new}/manifest.json", step=LAST))
    return True


def _origin_forged(place: Path, made: Sealed, source: random.Random) -> bool:
    """The record of the newest attempt, its lease and what its saves say of where it came from."""
    older = {"attempt": 1, "run": RUN, "step": 1}
    paths = [place / f"runs/{RUN}/a0002/attempt.json", *place.glob(f"runs/{RUN}/a0002/lease/*.json")]
    for path in (*paths, *place.glob(f"runs/{RUN}/a0002/*/begin.json")):
        _rewritten(path, lambda values: values.update(parent=older, by="rollback"))
    return True


ATTACKS: Final[Mapping[str, Attack]] = {
    "a plain checkpoint in place of a sealed one": _replaced,
    "another one in place of the one from before": _replaced_before,
    "a newer plain one": _newer,
    "a newer plain attempt": _newer_attempt,
    "the code taken off": _code_stripped,
    "plain, and the keys removed": _keys_removed,
    "plain, and the keys destroyed": _keys_destroyed,
    "plain, and put on the list": _listed,
    "the list removed": _list_removed,
    "a data file cut": _pack_cut,
    "a forged tag": _acts("refs/tag/prod/3.json"),
    "a forged pin": _acts("refs/pin/x/1.json"),
    "a forged metric": _acts(f"{_step(2)}/notes/*", f"{_step(BEST)}/notes/1.json"),
    "a forged verification": _acts(f"{_step(TAGGED)}/notes/*"),
    "forged damage": _acts(f"{_step(BEST)}/notes/2.json"),
    "a forged rollback": _acts(f"runs/{RUN}/a0003/attempt.json", f"runs/{RUN}/a0003/lease/*"),
    "a forged tombstone": _acts("tombstones/**/*.json", told=False),
    "a replayed tag": _tag_replayed,
    "a replayed note": _note_replayed,
    "a replayed checkpoint": _manifest_replayed,
    "a forged origin": _origin_forged,
}


# --------------------------------------------------------------------------------------------------
# Judging.


@dataclass
class ForgeryTally:
    cases: int = 0
    attacks: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    """How many readings ended in an error."""
    genuine: int = 0
    violations: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "attacks": dict(sorted(self.attacks.items())),
            "refused": self.refused,
            "genuine": self.genuine,
            "violation_count": len(self.violations),
            "violations": self.violations[:100],
        }


def run_forgeries(
    cases: int, seed: int, *, only: str | None = None, seconds: float | None = None, log: Callable[[str], None]
) -> ForgeryTally:
    """Judges `cases` cases in turn over the attacks, each alone or with another, or as many as there is time for."""
    tally, source, began = ForgeryTally(), random.Random(f"forgeries {seed}"), time.monotonic()
    names = list(ATTACKS) if only is None else [only]
    with workplace() as root:
        made = build(root)
        while tally.cases < cases and (seconds is None or time.monotonic() - began < seconds):
            name = names[tally.cases % len(names)]
            second = source.choice(list(ATTACKS)) if tally.cases >= len(names) and source.random() < 0.5 else ""
            strike(made, [name, second] if second else [name], source, tally)
            tally.cases += 1
            if not tally.cases % 20:
                log(f"{tally.cases:,} cases, {len(tally.violations)} violations")
    return tally


@contextmanager
def workplace() -> Iterator[Path]:
    within = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="tenuto-forgeries-", dir=within) as root:
        names = (keys.KEY_FILE, keys.KEY_TEXT, keys.PASSPHRASE)
        cleared = {name: "" for name in names}
        with mock.patch.dict(os.environ, cleared), warnings.catch_warnings():
            warnings.simplefilter("ignore", tenuto.TenutoWarning)  # what is passed over is told by warnings
            yield Path(root)


def strike(made: Sealed, names: list[str], source: random.Random, tally: ForgeryTally) -> None:
    """Forges in a copy, reads that with the key, and judges."""
    place = made.home.parent / "struck"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(made.home, place)
    tells = []
    for name in names:
        try:
            tells.append(ATTACKS[name](place, made, source))
            tally.attacks[name] += 1
        except (OSError, KeyError, StopIteration):
            continue  # the first one has left nothing to do this to
    for problem in _judge(place, made, must_tell=any(tells), tally=tally):
        tally.violations.append(f"{' and '.join(names)}: {problem}")


def _judge(place: Path, made: Sealed, *, must_tell: bool, tally: ForgeryTally) -> Iterator[str]:
    every_step = set(range(1, LAST + 1))
    best = _best(place, made) if _has(place, made, BEST) else every_step  # without the best, another one is
    wanted: list[tuple[int | str, set[int]]] = [(step, {step}) for step in range(1, LAST + 1)]
    wanted += [(LAST + 1, set()), ("prod", {TAGGED}), ("best:loss:min", best)]
    for step, right in wanted:
        yield from _read_otherwise(tally, f"load {step}", right, partial(_loaded, place, made, step))
    newest = {LAST} if _can_load(place, made, LAST) else every_step
    yield from _read_otherwise(tally, "load latest", newest, partial(_loaded, place, made, "latest"))
    yield from _read_otherwise(tally, "resume", newest, partial(_resumed, place, made))
    yield from _retained(place, made)
    if must_tell and _whole(place, made):
        yield "verify calls it whole"


def _read_otherwise(
    tally: ForgeryTally, what: str, right: set[int], read: Callable[[], Mapping[str, Any]]
) -> Iterator[str]:
    try:
        state = read()
    except TenutoError:
        tally.refused += 1
        return
    tally.genuine += 1
    if not any(
        state["n"] == step and isinstance(state["w"], np.ndarray) and np.array_equal(state["w"], state_of(step)["w"])
        for step in right
    ):
        yield f"{what} gives step {state['n']} with {np.asarray(state['w'])[0]}, not what the key's holder has saved"


def _loaded(place: Path, made: Sealed, step: int | str) -> Mapping[str, Any]:
    state: Mapping[str, Any] = tenuto.load(place, step=step, key=made.key, log="silent").state
    return state


def _can_load(place: Path, made: Sealed, step: int) -> bool:
    try:
        return bool(_loaded(place, made, step))
    except TenutoError:
        return False


def _resumed(place: Path, made: Sealed) -> Mapping[str, Any]:
    """In a copy: a resume claims the run."""
    copy = place.with_name("resumed")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(place, copy)
    state = poison_of(0)
    with tenuto.Checkpointer(copy, state, save=every(steps=1000), log="silent", on_error="raise", key=made.key) as ckpt:
        ckpt.restore()
    return state if state["n"] else state_of(1)


def _retained(place: Path, made: Sealed) -> Iterator[str]:
    """The best by the metric that the holder has logged, and the last one that the holder has verified."""
    try:
        repo = Repo.open(open_store(place))
        unlock(repo, made.key)
        plan = preview(repo, RUN, keep.best(1, "loss", mode="min"))
        newest = preview(repo, RUN, keep.latest(1))
    except TenutoError:
        return
    if _is_genuine(repo, CheckpointId(RUN, 2, LAST)) and any(id.step == LAST for id in newest.dropped):
        yield f"retention drops step {LAST}, the newest that the key vouches for"
    whole = {id.step for id in repo.checkpoints(RUN) if _is_genuine(repo, id)}
    dropped = {id.step for id in plan.dropped if id.attempt == 2}
    lost = {BEST, TAGGED, 2} & whole & dropped
    if lost:
        yield f"retention drops {sorted(lost)}, and what was forged has made it"


def _has(place: Path, made: Sealed, step: int) -> bool:
    try:
        repo = Repo.open(open_store(place))
        unlock(repo, made.key)
    except TenutoError:
        return False
    return _is_genuine(repo, CheckpointId(RUN, 2, step))


def _best(place: Path, made: Sealed) -> set[int]:
    """The best of those that can be compared: one beside which a forged note lies is not, since what it may have
    replaced is not known."""
    repo = Repo.open(open_store(place))
    unlock(repo, made.key)
    compared = [
        step
        for step in range(2, LAST + 1)
        if _has(place, made, step) and not unread(id := CheckpointId(RUN, 2, step), notes(repo, id))
    ]
    return {min(compared, key=LOSS.__getitem__, default=1)}


def _is_genuine(repo: Repo, id: CheckpointId) -> bool:
    try:
        return bool(repo.manifest(id).code)
    except TenutoError:
        return False


def _whole(place: Path, made: Sealed) -> bool:
    try:
        repo = Repo.open(open_store(place))
        unlock(repo, made.key)
        report = execute(repo, plan_verify(repo))
    except TenutoError:
        return False
    return not report.errors


# --------------------------------------------------------------------------------------------------
# Bugs, seeded one at a time.


@dataclass(frozen=True)
class ForgeryBug:
    name: str
    breaks: str
    patch: Callable[[], AbstractContextManager[Any]]
    attack: str


def _plain_passes() -> AbstractContextManager[Any]:
    vouch = Repo.vouch

    def lenient(self: Repo, name: str, data: bytes, code: str) -> None:
        if code:
            vouch(self, name, data, code)

    return mock.patch.object(Repo, "vouch", lenient)


def _unjudged(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """Small objects of this kind are read without a look at their code."""
    decode = Repo.decode

    def lenient(self: Repo, wanted: str, name: str, data: bytes) -> objects.Fields:
        return objects.decode(wanted, name, data, self.id) if wanted == kind else decode(self, wanted, name, data)

    return lambda: mock.patch.object(Repo, "decode", lenient)


def _codes_unchecked() -> AbstractContextManager[Any]:
    return mock.patch.object(RepositoryKeys, "check_object", lambda *rest: None)


def _no_keys_is_fine() -> AbstractContextManager[Any]:
    find = keys.unlock

    def lenient(repo: Repo, given: Any = None, *, writing: bool = False) -> None:
        try:
            find(repo, given, writing=writing)
        except KeyMissing:
            return

    return replacing(find, lenient)


BUGS: Final = (
    ForgeryBug("plain passes", "a plain checkpoint is loaded", _plain_passes, "a newer plain one"),
    ForgeryBug("tags are not judged", "a tag leads elsewhere", _unjudged("ref"), "a forged tag"),
    ForgeryBug("notes are not judged", "another one is the best", _unjudged("note"), "a forged metric"),
    ForgeryBug("attempts are not judged", "a rollback that nobody made", _unjudged("attempt"), "a forged rollback"),
    ForgeryBug("codes are not checked", "what was changed is believed", _codes_unchecked, "a replayed note"),
    ForgeryBug(
        "the list is not checked", "whoever is on it is believed", _codes_unchecked, "plain, and put on the list"
    ),
    ForgeryBug("no keys is fine", "plain values are loaded", _no_keys_is_fine, "plain, and the keys removed"),
    ForgeryBug("destroyed is fine", "plain values are loaded", _no_keys_is_fine, "plain, and the keys destroyed"),
)


def caught(bug: ForgeryBug, seed: int) -> str:
    """Returns the first violation that a bug makes; empty if it goes unseen."""
    with bug.patch():
        found = run_forgeries(3, seed, only=bug.attack, log=lambda line: None).violations
    return found[0] if found else ""
