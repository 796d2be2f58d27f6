"""The arguments of a Checkpointer, checked before anything is touched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Final, Literal, cast, get_args

from tenuto.concurrency.deadlines import seconds
from tenuto.errors import PolicyConflict, UsageError
from tenuto.model.ids import run_key
from tenuto.policy import every, keep, on
from tenuto.policy import keep as keeping
from tenuto.policy.encoding import Encoding, encoding_of
from tenuto.policy.keep import Best, KeepPolicy
from tenuto.policy.numbers import metric_name, min_or_max
from tenuto.policy.save import EveryOptimum, EveryStall, OnImprove, SavePolicy, parts_of
from tenuto.record import record
from tenuto.repo.best import BestSelector, Mode
from tenuto.repo.keys import KeySource
from tenuto.repo.refs import check_tag, is_name
from tenuto.sharding.write_plan import Strategy
from tenuto.state.frameworks import find_snapshot
from tenuto.training.emergency import Places, emergency_directories
from tenuto.training.unhealthy import Unhealthy

OnBusy = Literal["wait", "skip"]
OnError = Literal["warn", "raise"]
Capture = Literal["eager", "fenced"]
OnUnhealthy = Callable[[Unhealthy], object] | Literal["stop"] | None
ResumeFrom = Literal["latest"] | int | str | None
"""A step, a tag (of another run, too: that forks it), attempt/step such as "a0007/500", or None to start afresh."""


@record
class Settings:
    """The arguments of a Checkpointer, checked, with the defaults in place."""

    run: str
    save: SavePolicy
    keep: KeepPolicy
    resume_from: ResumeFrom
    in_flight: int
    on_busy: OnBusy
    on_error: OnError
    takeover: bool
    wait_for_owner_s: float | None
    memory: SavePolicy | None
    memory_budget: int | None
    encoding: Encoding
    key: KeySource | None
    fenced: bool
    health: bool
    on_unhealthy: OnUnhealthy
    ranks_timeout_s: float
    ranks_silence_s: float
    writers: Strategy
    emergency: tuple[str, ...]
    emergency_after_s: float
    watched: Mapping[str, str]
    """The metrics that the policies read, each with the policies that do, as the user wrote them."""
    modes: Mapping[str, Mode]
    """In which direction each metric improves, where a policy says so."""
    by_name: tuple[str, ...]
    """The metrics of which more is taken to be better, since their names say so."""

    @classmethod
    def checked(
        cls,
        state: object,
        *,
        run: str,
        save: object,
        keep: object,
        resume_from: object,
        in_flight: object,
        on_busy: object,
        on_error: object,
        takeover: bool,
        wait_for_owner: float | None,
        memory: object,
        memory_budget: object,
        encoding: object,
        key: KeySource | None,
        capture: object,
        health: object,
        on_unhealthy: object,
        ranks_timeout: float,
        ranks_silence: float,
        writers: object,
        emergency: Places | None,
        emergency_after: float,
    ) -> Settings:
        """Returns the settings. Raises UsageError, naming the argument, for what makes no sense."""
        if not isinstance(state, Mapping):
            raise UsageError(
                f"state must be a mapping of names to what is to be saved, not {type(state).__name__}",
                subject="state",
                hint='write {"model": model, "optimizer": optimizer}',
            )
        _refuse_snapshots(state)
        policy = save if save is not None else every(minutes=10) | on.end() | on.signal()
        if policy == "auto":
            policy = every(auto=True) | on.end() | on.signal()
        kept = keep if keep is not None else keeping.latest(3)
        if not isinstance(policy, SavePolicy):
            raise UsageError(
                f"save={save!r} does not say when to save",
                subject="save",
                hint='save=every(steps=200) | on.end(), or save="auto"',
            )
        if not isinstance(kept, KeepPolicy):
            raise UsageError(
                f"keep={keep!r} does not say what to keep",
                subject="keep",
                hint='keep=keep.latest(3) | keep.best(2, "val_loss")',
            )
        run_key(run)
        return cls(
            run=run,
            save=policy,
            keep=kept,
            resume_from=checked_start(resume_from),
            in_flight=count(in_flight, "in_flight=", least=1),
            on_busy=cast("OnBusy", _one_of(("wait", "skip"), "on_busy", on_busy)),
            on_error=cast("OnError", _one_of(("warn", "raise"), "on_error", on_error)),
            takeover=takeover,
            wait_for_owner_s=None if wait_for_owner is None else seconds(wait_for_owner, "wait_for_owner="),
            memory=_memory_policy(memory),
            memory_budget=_memory_budget(memory_budget),
            encoding=encoding_of(encoding),
            key=key,
            fenced=_one_of(("eager", "fenced"), "capture", capture) == "fenced",
            health=_health(health, on_unhealthy),
            on_unhealthy=cast("OnUnhealthy", on_unhealthy),
            ranks_timeout_s=seconds(ranks_timeout, "ranks_timeout="),
            ranks_silence_s=seconds(ranks_silence, "ranks_silence="),
            writers=strategy(writers),
            emergency=emergency_directories(emergency),
            emergency_after_s=seconds(emergency_after, "emergency_after="),
            watched=watched(policy, kept),
            modes=modes(policy, kept),
            by_name=by_name(policy, kept),
        )

    def alike(self) -> dict[str, str]:
        """Returns the arguments that have to be the same on all ranks of a job, each by name, as text.

        Of several ranks that differ in one, some would save, skip or resume where the others do not.
        """
        return {
            "save": _spelled(self.save),
            "keep": _spelled(self.keep),
            "memory": _spelled(self.memory),
            "resume_from": str(self.resume_from),
            "in_flight": str(self.in_flight),
            "on_busy": self.on_busy,
            "encoding": str(self.encoding),
            "capture": "fenced" if self.fenced else "eager",
            "emergency": "; ".join(self.emergency),
        }


def _refuse_snapshots(state: Mapping[Any, Any]) -> None:
    """Raises UsageError for what `torch.save` is given, and what would be saved unchanged for ever here."""
    found = find_snapshot(state)
    if found is None:
        return
    entry = "state" + "".join(f"[{key!r}]" for key in found.keys)
    key = found.keys[-1] if found.keys else ""
    name = key.removesuffix("state_dict").removesuffix("_") if isinstance(key, str) else ""
    if not name.isidentifier():
        name = {"module": "model", "GradScaler": "scaler"}.get(found.owner, found.owner)
    written = f"`{name}`" if found.keys else f'`{{"{name}": {name}}}`'
    an = "an" if found.owner == "optimizer" else "a"
    raise UsageError(
        f"{entry} is what state_dict() of {an} {found.owner} returned: a snapshot, which does not follow training",
        subject=entry,
        hint=f"pass {written} itself, not `{name}.state_dict()`: the Checkpointer reads it at every save",
    )


_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


def _spelled(policy: SavePolicy | KeepPolicy | None) -> str:
    """Returns the text of a policy, without the addresses that a policy of one's own may have in it: they differ from
    process to process."""
    return _ADDRESS.sub("", repr(policy))


def watched(save: SavePolicy, keep: KeepPolicy) -> Mapping[str, str]:
    """Returns each metric that a policy reads, with the policies that do, as the user wrote them."""
    found: dict[str, list[str]] = {}
    for part in _parts(save, keep):
        for metric in part.metrics():
            found.setdefault(metric, []).append(repr(part))
    return {metric: " and ".join(found[metric]) for metric in sorted(found)}


def modes(save: SavePolicy, keep: KeepPolicy) -> Mapping[str, Mode]:
    """Returns in which direction each metric improves that keep.best and on.improve judge by; none of one about which
    they differ."""
    said: dict[str, set[Mode]] = {}
    for part in _parts(save, keep):
        if isinstance(part, Best | OnImprove):
            said.setdefault(part.metric, set()).add(part.mode)
    return {metric: said[metric].pop() for metric in sorted(said) if len(said[metric]) == 1}


def by_name(save: SavePolicy, keep: KeepPolicy) -> tuple[str, ...]:
    """Returns the metrics of which keep.best and on.improve keep the highest because of their names."""
    parts = (part for part in _parts(save, keep) if isinstance(part, Best | OnImprove))
    return tuple(sorted({part.metric for part in parts if part.by_name}))


def _parts(save: SavePolicy, keep: KeepPolicy) -> list[SavePolicy | KeepPolicy]:
    return [*parts_of(save), *keep.parts()]


def _one_of(known: tuple[str, str], what: str, value: object) -> object:
    if value not in known:
        raise UsageError(
            f"{what}={value!r} is neither {known[0]!r} nor {known[1]!r}",
            subject=what,
            hint=f'{what}="{known[0]}"',
        )
    return value


def checked_start(value: object) -> ResumeFrom:
    """Returns `value` if it can say where training starts; else raises UsageError."""
    if isinstance(value, str):
        sensible = BestSelector.parse(value) is not None or is_name(value) or "/" in value
    else:
        sensible = value is None or (isinstance(value, int) and not isinstance(value, bool))
    if not sensible:
        raise UsageError(
            f"resume_from={value!r} is neither 'latest', a step, a tag, best:METRIC, nor None",
            hint='resume_from="latest", a step such as 500, or "best:val_loss"',
        )
    return cast("ResumeFrom", value)


def _health(health: object, on_unhealthy: object) -> bool:
    """Returns whether saves look at values. Raises UsageError for what makes no sense, together or alone."""
    if not isinstance(health, bool):
        raise UsageError(f"health={health!r} is neither True nor False", subject="health", hint="health=False")
    if on_unhealthy is not None and on_unhealthy != "stop" and not callable(on_unhealthy):
        raise UsageError(
            f"on_unhealthy={on_unhealthy!r} is neither 'stop' nor a function",
            subject="on_unhealthy",
            hint='on_unhealthy="stop", or a function of a tenuto.Unhealthy',
        )
    return health


def _memory_budget(value: object) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
        raise UsageError(
            f"memory_budget={value!r} is not a number of bytes", subject="memory_budget", hint="memory_budget=8 * 2**30"
        )
    return value


def _memory_policy(memory: object) -> SavePolicy | None:
    """Returns when states are sealed in memory. It may not depend on a metric or on what saves cost."""
    if memory is None:
        return None
    if not isinstance(memory, SavePolicy):
        raise UsageError(
            f"memory={memory!r} does not say when to keep the state in memory",
            subject="memory",
            hint="memory=every(steps=1)",
        )
    if memory.metrics():
        raise UsageError(
            f"memory={memory!r} depends on a metric; what is kept in memory is the newest state, not the best",
            subject="memory",
            hint="memory=every(steps=1), and save=... | on.improve(...) for the store",
        )
    if any(isinstance(part, EveryStall | EveryOptimum) for part in parts_of(memory)):
        raise UsageError(
            f"memory={memory!r} depends on what saves to the store cost, which says nothing about a state in memory",
            subject="memory",
            hint="memory=every(steps=10) or every(minutes=1), and save=every(auto=True) for the store",
        )
    return memory


def strategy(writers: object) -> Strategy:
    """Returns the rule by which ranks share out what several of them hold."""
    known = get_args(Strategy)
    if writers not in known:
        raise UsageError(
            f"writers={writers!r} is not one of {', '.join(map(repr, known))}",
            subject="writers",
            hint='writers="balanced"',
        )
    return cast("Strategy", writers)


def count(value: object, what: str, least: int = 0) -> int:
    """Returns `value` if it is a whole number of at least `least`; else raises UsageError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(
            f"{what} takes a whole number of at least {least}, not {value!r}",
            subject=what,
            hint=f"give a plain int, such as {max(least, 1)}",
        )
    return value


# --------------------------------------------------------------------------------------------------
# Names that users of other libraries know, as policies.
#
# `save_top_k`, `monitor`, `mode` and `save_last` mean what they mean to Lightning's ModelCheckpoint, `max_to_keep`
# what it means to Orbax's CheckpointManager. What `latest` means always stays: a run has to resume from something.

SAYS = (
    "save_top_k=k with monitor= keeps the k best, save_top_k=-1 all, save_last=True or save_top_k=1 alone the last, "
    "max_to_keep=n the newest n"
)


@record
class ArgumentAliases:
    """The names as they were given; None where one was not."""

    save_top_k: int | None = None
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None
    save_last: bool | None = None
    max_to_keep: int | None = None

    @property
    def given(self) -> list[str]:
        """The names with their values, as a user writes them."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [f"{name}={value!r}" for name, value in values if value is not None]

    def policies(self, save: object, kept: KeepPolicy | None) -> tuple[object, KeepPolicy | None]:
        """Returns `save` and `keep` unchanged if none of the names was given, else what the names mean.

        Raises PolicyConflict where they contradict each other or `keep`.
        """
        if not self.given:
            return save, kept
        self._check_types()
        if kept is not None:
            raise self._conflict(f"keep={kept!r} already says what to keep")
        if self.mode is not None and self.monitor is None:
            raise self._conflict("mode has no effect without monitor")
        if self.max_to_keep is not None:
            if len(self.given) > 1:
                raise self._conflict("max_to_keep counts the newest, and does not mix with the others")
            return save, keep.latest(self.max_to_keep)
        if save is None and self.monitor is not None and self._top > 0:
            asked = OnImprove.of(self.monitor, self.mode, top=self._top)
            save = every(minutes=10) | on.end() | on.signal() | asked
        return save, self._keep()

    @property
    def _top(self) -> int:
        return 1 if self.save_top_k is None else self.save_top_k

    def _keep(self) -> KeepPolicy | None:
        if self._top == -1:
            return keep.all()
        last = keep.latest(1)
        if self._top == 0:
            if not self.save_last:
                raise self._conflict("save_top_k=0 asks for no checkpoints at all")
            return last
        if self.monitor is not None:
            best = keep.best(self._top, self.monitor, self.mode)
            return best | last if self.save_last else best
        if self._top > 1:
            raise self._conflict(f"the best {self._top} of what? monitor names no metric")
        return last if self.save_last or self.save_top_k == 1 else None

    def _check_types(self) -> None:
        top = self.save_top_k
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < -1):
            raise UsageError(
                f"save_top_k={top!r} is not a whole number of at least -1", subject="save_top_k", hint="save_top_k=3"
            )
        if self.save_last is not None and not isinstance(self.save_last, bool):
            raise UsageError(
                f"save_last={self.save_last!r} is neither True nor False", subject="save_last", hint="save_last=True"
            )
        if self.monitor is not None:
            metric_name(self.monitor, 'monitor="val_loss"')
        if self.mode is not None:
            min_or_max(self.mode, self.monitor or "mode")

    def _conflict(self, why: str) -> PolicyConflict:
        return PolicyConflict(f"{', '.join(self.given)}: {why}", subject=self.given[0].partition("=")[0], hint=SAYS)


# --------------------------------------------------------------------------------------------------
# What `log` is given: metrics as plain floats, tags as checked names.


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns each metric that is not None as a float (a tensor of one element too). UsageError names one that is no
    number."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if value is None:
            continue
        try:
            # A tensor's own item(): float() of one that requires gradients warns.
            item = getattr(value, "item", None)
            found[name] = float(item() if callable(item) else value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UsageError(
                f"the metric {name!r} is not a number: {type(value).__name__}",
                subject=name,
                hint=f"log one number, such as {name}=loss.item()",
            ) from error
    return found


def tag_names(tag: str | Iterable[str] | None) -> list[str]:
    """Returns the tags, each once. UsageError names one that cannot be a tag."""
    if tag is None:
        return []
    if not isinstance(tag, (str, list, tuple, set, frozenset)):
        raise UsageError(f"tag={tag!r} is neither a name nor a list of names", subject="tag", hint='tag="baseline"')
    return list(dict.fromkeys(check_tag(name) for name in ([tag] if isinstance(tag, str) else sorted(tag))))
