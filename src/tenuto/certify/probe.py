"""A Checkpointer under `tenuto certify`: in another place, saving when it is told to, telling every step."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from tenuto.certify.trail import Row
from tenuto.codec.digest import digest
from tenuto.errors import TenutoError, UsageError, typed
from tenuto.model import canonical_json
from tenuto.model.records import Json, Owner
from tenuto.policy import keep
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.save import Moment, SaveHistory, SavePolicy
from tenuto.repo.process import judge, this_process
from tenuto.state.contract import Flattened
from tenuto.state.encode.flattener import flatten
from tenuto.state.frameworks import type_name
from tenuto.state.position.positions import has_state
from tenuto.state.tree import ROOT, children, kind_of, walk
from tenuto.store.contract import Where
from tenuto.store.registry import CERTIFY_VARIABLE, open_store

if TYPE_CHECKING:
    from tenuto.training.snapshot import Snapshots
    from tenuto.training.training_session import TrainingSession


# --------------------------------------------------------------------------------------------------
# The state at one moment as entries that can be compared: each leaf's digest, each plain value as it is spelled.

SPELLED: Final = 80
"""Characters of a plain value; a longer one is told by its digest."""


def entries(flattened: Flattened) -> dict[str, str]:
    """Path -> what is there. Copies one leaf at a time to the host."""
    shared = sum(not spec.private for spec in flattened.specs)
    marks = [_leaf(flattened, number) for number in range(len(flattened.specs))]
    found = dict(_told(flattened.tree, _by_leaf(flattened, marks[:shared]), ""))
    if flattened.private is not None:
        found.update(_told(flattened.private, marks[shared:], ""))
    return found


def _by_leaf(flattened: Flattened, marks: list[str]) -> list[str]:
    """What there is of each leaf here: of one that is cut over ranks every part that this rank holds, or none."""
    if flattened.leaf is None:
        return marks
    rows = list(zip(flattened.leaf, marks, strict=False))
    found = [""] * (
        flattened.shared if flattened.shared is not None else max((leaf + 1 for leaf, _ in rows), default=0)
    )
    for leaf, mark in rows:
        found[leaf] = f"{found[leaf]}, {mark}" if found[leaf] else mark
    return [mark or "no part of it" for mark in found]


def mark_of(value: Any) -> str | None:
    """A digest of anything that could be in a state, such as a batch; None for what has no representation."""
    try:
        return digest(canonical_json.dumps(entries(flatten({"value": value})))).hex()
    except TenutoError:
        return None


def _told(tree: Json, marks: list[str], path: str) -> Iterator[tuple[str, str]]:
    for where, node in walk(tree, path):
        kind = kind_of(node)
        if kind == "leaf":
            yield where or ROOT, marks[int(node["n"])]
        elif kind == "alias":
            yield where or ROOT, f"the same as leaf {node['n']}"
        elif not children(node, where):
            text = canonical_json.dumps(node).decode("ascii")
            yield where or ROOT, text if len(text) <= SPELLED else f"xxh3:{digest(text.encode()).hex()}"


def _leaf(flattened: Flattened, number: int) -> str:
    spec, source = flattened.specs[number], flattened.sources[number]
    content = np.empty(spec.nbytes, np.uint8)
    if spec.nbytes:
        bound = flattened.devices[flattened.device[number]].bind([spec], [content])
        bound.copy([source], 0, 1)
        bound.wait()
    where = "" if spec.offsets is None else f" at {list(spec.offsets)}"
    return f"{spec.dtype}{list(spec.shape)}{where} xxh3:{digest(content).hex()}"


# --------------------------------------------------------------------------------------------------
# What `certify` tells the Checkpointer of the script that it runs, through the environment.

VARIABLE: Final = CERTIFY_VARIABLE


@dataclass(frozen=True, slots=True)
class CertifyOrder:
    """where: the place that the script is told to use, and must not touch. scratch: the one that it gets instead.
    trail: the file that it tells its steps in, of several ranks the first one (`trail_of`: each). save_at: the step to
    save, and to be killed after; None saves nothing. last: the step after which to leave. owner: who asks; when that
    process is gone, there is nothing left to do.
    """

    where: str
    scratch: str
    trail: str
    last: int
    save_at: int | None
    owner: Owner

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    def trail_of(self, rank: int) -> str:
        return f"{self.trail}.rank-{rank:05}" if rank else self.trail

    def means(self, where: Where) -> bool:
        """Whether the script means by `where` the place that is redirected."""
        return same_place(where, self.where)

    def orphaned(self) -> bool:
        return judge(self.owner) == "dead"


def same_place(one: Where, other: Where) -> bool:
    """Whether both name one store. Opening touches nothing."""
    return open_store(one).url.rstrip("/") == open_store(other).url.rstrip("/")


def order_of(where: str, scratch: str, trail: str, *, last: int, save_at: int | None) -> CertifyOrder:
    return CertifyOrder(where, scratch, trail, last, save_at, this_process())


def standing(environment: Mapping[str, str] | None = None) -> CertifyOrder | None:
    """The order that this process stands under; None outside `certify`. UsageError for one that cannot be read."""
    text = (os.environ if environment is None else environment).get(VARIABLE)
    if not text:
        return None
    try:
        found: dict[str, Any] = json.loads(text)
        return CertifyOrder(**{**found, "owner": Owner(**found["owner"])})
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{VARIABLE} is set and says nothing that can be understood: {error}",
            subject=VARIABLE,
            hint=f"unset {VARIABLE}: only `tenuto certify` sets it, for what it runs",
        ) from None


# --------------------------------------------------------------------------------------------------
# The script's side of `certify`: it tells its steps in a file, saves where it is told to, and leaves in time.

KILL_POLL_S: Final = 0.5
INSISTING: Final = 3
"""How often the process is asked to leave before it is ended: a script may catch what is raised."""


class EnoughSteps(SystemExit):
    """Every step that was wanted is done: this process leaves, with status 0."""

    def __init__(self) -> None:
        super().__init__(0)


class TrailWriter:
    """Appends records to the order's trail, each one write at the end of the file.

    Records: `built` (a Checkpointer stands), `row`, `saved` (the step is committed: kill me), `done`, and `refused`
    (why this script cannot be certified).
    """

    def __init__(self, order: CertifyOrder, rank: int = 0, world_size: int = 1) -> None:
        self.order = order
        self._trail = order.trail_of(rank)
        self._world_size = world_size
        self._asked = 0

    def begin(self, where: str, run: str) -> None:
        """Once for each trail: a second Checkpointer, here or in another process that is the same rank, is refused."""
        try:
            os.close(os.open(self._trail + ".claimed", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise self.refuse(
                "it builds more than one Checkpointer, and certify follows one",
                "certify a script that builds one; what several of them save has no common step to resume from",
            ) from None
        self.tell("built", where=where, run=run, ranks=self._world_size)

    def refuse(self, reason: str, hint: str) -> UsageError:
        """Tells why this script cannot be certified; the error to raise in it."""
        self.tell("refused", reason=reason, hint=hint)
        return UsageError(f"tenuto certify: {reason}", subject=self.order.where, hint=hint)

    def row(self, row: Row) -> None:
        self.tell("row", **row.record())

    def tell(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"record": kind, **fields}) + "\n"
        descriptor = os.open(self._trail, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode("ascii"))
        finally:
            os.close(descriptor)

    def await_kill(self, step: int) -> NoReturn:
        """Returns never: the step is committed, and whoever asked kills this process without a warning."""
        self.tell("saved", step=step)
        while True:
            self.check_owner()
            time.sleep(KILL_POLL_S)

    def leave(self, certificate: Mapping[str, Any], uncovered: tuple[str, ...], logged: Sequence[str]) -> None:
        """Every step is done. Raises EnoughSteps; a script that catches that and goes on is ended."""
        if self._asked == 0:
            self.tell("done", certificate=certificate, uncovered=list(uncovered), logged=list(logged))
        self._asked += 1
        if self._asked < INSISTING:
            raise EnoughSteps
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)

    def check_owner(self) -> None:
        """Ends this process, and its group, where nobody waits for it any more."""
        if self.order.orphaned():
            os.killpg(0, signal.SIGKILL)


# --------------------------------------------------------------------------------------------------
# What a training script holds besides its `state` and looks like state: guesses that help to find a cause, no more.

DEPTH: Final = 3
"""Containers and objects inside each other that are looked into, from a variable on."""
MOST: Final = 20_000
"""Objects that are looked at; a search for hints must come to an end."""
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)
_CLOSED: Final = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, str, bytes)
_WRAPPED: Final = ("module", "_orig_mod")


def uncovered(covered: tuple[Any, ...]) -> tuple[str, ...]:
    """Variables of the functions that are running, and of their modules, that hold a generator or something with
    `state_dict` and are not reached from `covered`. In words, each naming the variable."""
    reached = {id(value) for value in _reach(covered)}
    named: dict[int, str] = {}
    for name, root in _variables():
        for path, value in _inside(name, root):
            if id(value) not in reached and id(value) not in named and _holds_state(value, reached):
                named[id(value)] = f"{path} ({type_name(type(value))}) is not in `state`"
                reached.update(id(inner) for inner in _reach((value,)))
    return tuple(named.values())


def _holds_state(value: Any, reached: set[int]) -> bool:
    if isinstance(value, _GENERATORS) or type_name(type(value)) in ("torch.Generator", "torch._C.Generator"):
        return True
    if isinstance(value, type) or not has_state(value):
        return False
    if any(id(getattr(value, name)) in reached for name in _WRAPPED if hasattr(value, name)):
        return False
    try:
        return bool(value.state_dict())
    except Exception:  # noqa: BLE001 - anybody's code, asked only for a hint: one that cannot answer holds something
        return True


def _variables() -> Iterator[tuple[str, Any]]:
    """What the script's own functions that are running now have named, innermost first, then their modules."""
    modules: dict[int, dict[str, Any]] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _is_the_scripts(frame):
            modules[id(frame.f_globals)] = frame.f_globals
            if frame.f_locals is not frame.f_globals:
                yield from list(frame.f_locals.items())
        frame = frame.f_back
    for module in modules.values():
        yield from [(name, value) for name, value in list(module.items()) if not name.startswith("__")]


def _is_the_scripts(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    if name.partition(".")[0] == "tenuto" or name.startswith("importlib"):
        return False
    return "site-packages" not in frame.f_code.co_filename and not frame.f_code.co_filename.startswith("<frozen")


def _inside(name: str, root: Any) -> Iterator[tuple[str, Any]]:
    """`root` and what it holds, each with how to write it."""
    waiting: list[tuple[str, Any, int]] = [(name, root, 0)]
    seen: set[int] = set()
    while waiting and len(seen) < MOST:
        path, value, depth = waiting.pop(0)
        if id(value) in seen or isinstance(value, _CLOSED):
            continue
        seen.add(id(value))
        yield path, value
        if depth < DEPTH and type(value).__module__.partition(".")[0] != "tenuto":
            waiting += [(f"{path}{step}", inner, depth + 1) for step, inner in _below(value)]


def _reach(roots: tuple[Any, ...]) -> Iterator[Any]:
    waiting = list(roots)
    seen: set[int] = set()
    while waiting and len(seen) < MOST:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _CLOSED):
            continue
        seen.add(id(value))
        yield value
        waiting += [inner for _, inner in _below(value)]


def _below(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in list(value.items())]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{number}]", inner) for number, inner in enumerate(value)]
    held = getattr(value, "__dict__", None)
    return [(f".{key}", inner) for key, inner in list(held.items())] if isinstance(held, dict) else []


SAVE_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class AtStep(SavePolicy):
    """Saves once, at this step or the first one after it; never, if it is None."""

    step: int | None

    @property
    def alike(self) -> bool:
        return True

    def wants(self, now: Moment, history: SaveHistory) -> str | None:
        saved = history.last_saved_step
        if self.step is None or now.step < self.step or (saved is not None and saved >= self.step):
            return None
        return "tenuto certify asked for it"

    def __repr__(self) -> str:
        return f"save at step {self.step}"


class CertifyProbe:
    """One training of a script that is being certified."""

    def __init__(self, order: CertifyOrder, rank: int, world_size: int) -> None:
        self._order = order
        self._teller = TrailWriter(order, rank, world_size)
        self._batches: list[str | None] = []
        self.policy: SavePolicy = AtStep(order.save_at)
        self.keep: KeepPolicy = keep.latest(1)

    def place(self, where: Where, run: str) -> str:
        """The scratch place that stands for `where`. UsageError where the script means another place."""
        if not self._order.means(where):
            raise self._teller.refuse(
                f"its Checkpointer is for {open_store(where).url}, and not for the WHERE that was given",
                f"{typed('tenuto', 'certify', where)} -- …",
            )
        self._teller.begin(self._order.where, run)
        return self._order.scratch

    def attach(self, training: TrainingSession, snapshots: Snapshots, covered: tuple[Any, ...]) -> None:
        """From now on `training` tells what it does; `covered` is its state and its data."""
        self._snapshots = snapshots
        self._covered = covered
        training.on_step = self._completed
        training.claiming.on_restored = lambda: self._tell(training, start=True)
        training.position.on_batch = self._given

    def _given(self, batch: Any) -> None:
        self._batches.append(mark_of(batch))

    def _tell(self, training: TrainingSession, *, start: bool = False) -> None:
        counters = training.position.counters
        found = entries(self._snapshots.now())
        self._teller.row(
            Row(counters.step, counters.epoch, counters.batch, found, tuple(self._batches), start),
        )
        self._batches.clear()

    def _completed(self, training: TrainingSession) -> None:
        """After each step, before anything is saved for it."""
        self._teller.check_owner()
        self._tell(training)
        last = training.saving.last
        if self._order.save_at is not None and last is not None and self._order.save_at <= last.step < training.step:
            # A whole step was done beside the save. It is lost now, as the steps after a save are in a real kill.
            last.wait(SAVE_DEADLINE_S)
            self._teller.await_kill(last.step)
        if training.step >= self._order.last:
            training.saving.group.farewell(SAVE_DEADLINE_S)  # no rank leaves while another may still need it
            self._teller.leave(self._snapshots.certificate(), uncovered(self._covered), sorted(training.saving.logged))


def certify_probe(rank: int, world_size: int) -> CertifyProbe | None:
    """What this process, as a rank of its job, is to rehearse; None outside `tenuto certify`."""
    order = standing()
    return CertifyProbe(order, rank, world_size) if order is not None else None


def probed(where: Where) -> Where:
    """`where`, or under `tenuto certify` the scratch place that stands for it."""
    order = standing()
    return order.scratch if order is not None and order.means(where) else where
