"""The probe inside a script under `tenuto certify`: redirects its Checkpointer, saves on order, records every step."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import time
import types
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from tenuto.certify.proof import running_script
from tenuto.certify.verdict import Row
from tenuto.codec.digest import digest
from tenuto.concurrency.process import judge, this_process
from tenuto.errors import TenutoError, UsageError, typed
from tenuto.model import canonical_json
from tenuto.model.canonical_json import tag_number
from tenuto.model.records import Json, Owner
from tenuto.policy import keep
from tenuto.policy.save import Moment, SaveHistory, SavePolicy
from tenuto.record import record
from tenuto.state.contract import Flattened
from tenuto.state.encode.flattener import flatten
from tenuto.state.frameworks import type_name
from tenuto.state.position.positions import has_state
from tenuto.state.tree import OWN, ROOT, children, kind_of, walk
from tenuto.store.contract import Where
from tenuto.store.registry import CERTIFY_VARIABLE, broken_order, certify_order, open_store, same_store

if TYPE_CHECKING:
    from tenuto.training.arguments import Settings
    from tenuto.training.snapshot import Snapshots
    from tenuto.training.training_session import TrainingSession


# The state as comparable entries: each leaf's digest, each plain value's spelling.

SPELLED: Final = 80
"""Longest plain value kept verbatim, in characters; a longer one is replaced by its digest."""


def entries(flattened: Flattened) -> dict[str, str]:
    """Returns the state's entries by path. Copies one leaf at a time to the host."""
    shared = sum(not spec.private for spec in flattened.specs)
    marks = [_leaf(flattened, number) for number in range(len(flattened.specs))]
    found = dict(_spelled_entries(flattened.tree, _by_leaf(flattened, marks[:shared]), ""))
    if flattened.private is not None:
        found.update(_spelled_entries(flattened.private, marks[shared:], ""))
    return found


def spelled(flattened: Flattened) -> dict[str, str]:
    """Returns the plain values of the state that ranks share, by path, as `entries` spells them; none of its leaves."""
    return spelled_values(flattened.tree)


def spelled_values(tree: Json) -> dict[str, str]:
    """Returns the plain values of a tree by path, as `entries` spells them; none that each rank has for itself."""
    found: dict[str, str] = {}
    for where, node in walk(tree, ""):
        if kind_of(node) not in ("leaf", "alias", OWN) and not children(node, where):
            found[where or ROOT] = _spelling(node)
    return found


def _by_leaf(flattened: Flattened, marks: list[str]) -> list[str]:
    """Returns one mark for each leaf: all parts of a sharded leaf that this rank holds, or "no part of it"."""
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
    """Returns a digest of any value that a state could hold, such as a batch; None if it has no representation."""
    try:
        return digest(canonical_json.dumps(entries(flatten({"value": value})))).hex()
    except TenutoError:
        return None


def _spelled_entries(tree: Json, marks: list[str], path: str) -> Iterator[tuple[str, str]]:
    for where, node in walk(tree, path):
        kind = kind_of(node)
        if kind == "leaf":
            yield where or ROOT, marks[int(node["n"])]
        elif kind == "alias":
            yield where or ROOT, f"the same as leaf {node['n']}"
        elif not children(node, where):
            yield where or ROOT, _spelling(node)


def _spelling(node: Json) -> str:
    text = canonical_json.dumps(node).decode("ascii")
    return text if len(text) <= SPELLED else f"xxh3:{digest(text.encode()).hex()}"


def content_of(flattened: Flattened, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns a copy of a leaf's bytes in host memory."""
    spec, source = flattened.specs[number], flattened.sources[number]
    content = np.empty(spec.nbytes, np.uint8)
    if spec.nbytes:
        bound = flattened.devices[flattened.device[number]].bind([spec], [content])
        bound.copy([source], 0, 1)
        bound.wait()
    return content


def _leaf(flattened: Flattened, number: int) -> str:
    spec, content = flattened.specs[number], content_of(flattened, number)
    where = "" if spec.offsets is None else f" at {list(spec.offsets)}"
    return f"{spec.dtype}{list(spec.shape)}{where} xxh3:{digest(content).hex()}"


# The order that `certify` passes to the script's Checkpointer through the environment.

VARIABLE: Final = CERTIFY_VARIABLE


@record
class CertifyOrder:
    """The order for one run of the script.

    where: the store that the script names, and must not touch.
    scratch: the store that it gets instead.
    trail: the file for its steps, of rank 0 (`trail_of`: of each rank).
    save_at: the step to save, and to be killed after; None saves nothing.
    last: the step after which to exit.
    owner: the certifying process; once it is gone, the script ends.
    metrics_only: whether metrics are recorded after each step, and not the state.
    """

    where: str
    scratch: str
    trail: str
    last: int
    save_at: int | None
    owner: Owner
    metrics_only: bool = False

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    def trail_of(self, rank: int) -> str:
        return f"{self.trail}.rank-{rank:05}" if rank else self.trail

    def means(self, where: Where) -> bool:
        """Returns whether `where` is the redirected store, or what it is redirected to."""
        return same_store(where, self.where) or same_store(where, self.scratch)

    def orphaned(self) -> bool:
        return judge(self.owner) == "dead"


def order_of(
    where: str, scratch: str, trail: str, *, last: int, save_at: int | None, metrics_only: bool = False
) -> CertifyOrder:
    return CertifyOrder(where, scratch, trail, last, save_at, this_process(), metrics_only)


def current_order(environment: Mapping[str, str] | None = None) -> CertifyOrder | None:
    """Returns the order for this process; None outside `certify`. Raises UsageError if it cannot be parsed."""
    found = certify_order(environment)
    if found is None:
        return None
    try:
        return CertifyOrder(**{**found, "owner": Owner(**found["owner"])})
    except (TypeError, KeyError) as error:
        raise broken_order(error) from None


# The script's side: it records its steps in a file, saves on order, and exits in time.

KILL_POLL_S: Final = 0.5
INSISTING: Final = 3
"""How often the process is asked to exit before it is ended: a script may catch the exception."""


class EnoughSteps(SystemExit):
    """Ends the process with status 0 once every wanted step is done."""

    def __init__(self) -> None:
        super().__init__(0)


class TrailWriter:
    """Appends records to the order's trail, each in one write at the end of the file.

    Records: `built` (a Checkpointer exists), `row`, `metrics` (of a completed step), `saved` (the step is
        committed: kill me), `done`, and `refused` (why this script cannot be certified).
    """

    def __init__(self, order: CertifyOrder, rank: int = 0, world_size: int = 1) -> None:
        self.order = order
        self._trail = order.trail_of(rank)
        self._world_size = world_size
        self._asked = 0

    def begin(self, where: str, run: str) -> None:
        """Claims the trail. Refuses a second Checkpointer, here or in another process with the same rank."""
        try:
            os.close(os.open(self._trail + ".claimed", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise self.refuse(
                "it builds more than one Checkpointer, and certify follows one",
                "certify a script that builds one; what several of them save has no common step to resume from",
            ) from None
        self.write("built", where=where, run=run, ranks=self._world_size)

    def refuse(self, reason: str, hint: str) -> UsageError:
        """Records why this script cannot be certified and returns the error to raise."""
        self.write("refused", reason=reason, hint=hint)
        return UsageError(f"tenuto certify: {reason}", subject=self.order.where, hint=hint)

    def row(self, row: Row) -> None:
        self.write("row", **row.record())

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"record": kind, **fields}) + "\n"
        descriptor = os.open(self._trail, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode("ascii"))
        finally:
            os.close(descriptor)

    def await_kill(self, step: int) -> NoReturn:
        """Records that the step is committed and waits to be killed."""
        self.write("saved", step=step)
        while True:
            self.check_owner()
            time.sleep(KILL_POLL_S)

    def leave(self, **done: Any) -> None:
        """Records `done` and raises EnoughSteps once every step is done; ends a script that catches it and
        continues."""
        if self._asked == 0:
            self.write("done", **done)
        self._asked += 1
        if self._asked < INSISTING:
            raise EnoughSteps
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)

    def check_owner(self) -> None:
        """Kills this process group if the certifying process is gone."""
        if self.order.orphaned():
            os.killpg(0, signal.SIGKILL)


# State that a script keeps outside `state`: guesses that help to find a cause, no more.

DEPTH: Final = 3
"""How deep containers and objects are searched from a variable."""
MAX_OBJECTS: Final = 20_000
"""The most objects to inspect: a search for hints must end."""
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)
_CLOSED: Final = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, str, bytes)
_WRAPPED: Final = ("module", "_orig_mod")


def uncovered(covered: tuple[Any, ...]) -> tuple[str, ...]:
    """Describes variables of the running functions and their modules that hold state not reached from `covered`.

    Such a variable holds a random generator or an object with a `state_dict`.
    """
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
    """Yields the variables of the script's running functions, innermost first, then those of their modules."""
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
    """Yields `root` and the objects below it, each with its expression."""
    waiting: list[tuple[str, Any, int]] = [(name, root, 0)]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_OBJECTS:
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
    while waiting and len(seen) < MAX_OBJECTS:
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


@record
class AtStep(SavePolicy):
    """Saves once, at `step` or the first one after it; never if it is None."""

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
    """Follows one training of a script that is being certified."""

    def __init__(self, order: CertifyOrder, rank: int, world_size: int) -> None:
        self._order = order
        self._trail_writer = TrailWriter(order, rank, world_size)
        self._batches: list[str | None] = []
        self._memory = False
        """Whether the script keeps states in memory, which is left out here."""

    def replace(self, where: Where, settings: Settings) -> tuple[Where, Settings]:
        """Returns the scratch store, and settings that save on order. Raises UsageError if the script uses another
        store than the one that is certified."""
        if not self._order.means(where):
            raise self._trail_writer.refuse(
                f"its Checkpointer is for {open_store(where).url}, and not for the WHERE that was given",
                f"{typed('tenuto', 'certify', where)} -- …",
            )
        self._trail_writer.begin(self._order.where, settings.run)
        save = AtStep(self._order.save_at)
        self._memory = settings.memory is not None
        return self._order.scratch, dataclasses.replace(
            settings, save=save, keep=keep.latest(1), on_busy="wait", on_error="raise", memory=None, emergency=()
        )

    def attach(self, session: TrainingSession, snapshots: Snapshots, covered: tuple[Any, ...]) -> None:
        """Begins to follow `session`; `covered`: its state and its data."""
        self._session = session
        self._snapshots = snapshots
        self._covered = covered
        self._conditions = snapshots.conditions()

    def batch_given(self, batch: Any) -> None:
        self._batches.append(mark_of(batch))

    def restored(self) -> None:
        self._record_row(start=True)

    def completed(self) -> None:
        session, save_at = self._session, self._order.save_at
        self._trail_writer.check_owner()
        self._record_row()
        last = session.saving.last
        if save_at is not None and last is not None and save_at <= last.step < session.step:
            # Training completed another step during the save. That step is lost now, as in a real kill.
            last.wait(SAVE_DEADLINE_S)
            self._trail_writer.await_kill(last.step)
        if session.step >= self._order.last:
            session.saving.group.farewell(SAVE_DEADLINE_S)  # no rank leaves while another may still need it
            script = running_script(self._conditions)
            self._trail_writer.leave(
                certificate=self._snapshots.certificate(),
                uncovered=list(uncovered(self._covered)),
                logged=sorted(session.saving.logged),
                memory=self._memory,
                script=script.record() if script is not None else None,
            )

    def _record_row(self, *, start: bool = False) -> None:
        counters = self._session.position.counters
        if self._order.metrics_only and not start:
            metrics = {name: tag_number(value) for name, value in self._session.metrics.items()}
            self._trail_writer.write("metrics", step=counters.step, metrics=metrics)
        found = {} if self._order.metrics_only else entries(self._snapshots.now())
        self._trail_writer.row(
            Row(counters.step, counters.epoch, counters.batch, found, tuple(self._batches), start),
        )
        self._batches.clear()


def certify_probe(rank: int, world_size: int) -> CertifyProbe | None:
    """Returns the probe for a rank of this process's job; None outside `tenuto certify`."""
    order = current_order()
    return CertifyProbe(order, rank, world_size) if order is not None else None
