"""Makes of settings what code would say: locations, policies and sinks, as arguments of a Checkpointer."""

from __future__ import annotations

import functools
import operator
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any, Final

from tenuto.errors import UsageError
from tenuto.model.ids import run_key
from tenuto.policy import every, keep, on
from tenuto.policy.keep import KeepPolicy
from tenuto.policy.save import SavePolicy
from tenuto.store.contract import Where
from tenuto.telemetry import JsonLines, LogSink, ProgressBar
from tenuto.training.arguments import ArgumentAliases, checked_start
from tenuto.training.config.document import Document, Place, dotted
from tenuto.training.config.keys import KEYS, Key
from tenuto.units import count, size

_CLASSES: Final[Mapping[str, str]] = {
    "Cached": "tenuto.store.wrappers.cache",
    "Mirror": "tenuto.repo.replicated.places",
    "Stripe": "tenuto.store.wrappers.stripe",
    "Tier": "tenuto.repo.replicated.tiers",
    "Tiers": "tenuto.repo.replicated.tiers",
}
"""Where the locations' classes are: none is imported by a training that has one directory."""
_OF_LOCATION: Final = ("where", "kind", "part", "copies", "node", "cache", "tiers")
_OF_TIER: Final = ("name", "per_node", "capacity", "wait", "bandwidth", "encoding")
_ALIASES: Final = ("save_top_k", "monitor", "mode", "save_last", "max_to_keep")
_INTERVALS: Final = ("steps", "minutes", "hours", "epochs", "stall", "auto", "mtbf_hours")
_SPANS: Final = ("hourly", "daily", "weekly", "monthly", "yearly")
_BUDGET: Final[Mapping[str, str]] = {"budget": "bytes", "cost": "cost", "cost_per_gib_month": "per_gib_month"}
_PLAIN: Final = tuple(key.name for key in KEYS if isinstance(key, Key) and key.name not in _OF_LOCATION)
"""Keys whose value is the argument of that name."""


def arguments(document: Document, given: Collection[str] = ()) -> dict[str, Any]:
    """Returns the arguments of a Checkpointer that `document` says. given: names that its caller says instead.

    Raises UsageError, which names the line, for what is wrong.
    """
    document.check()
    check(document, given)
    document.check()
    values = document.values
    found = {name: values[name] for name in _PLAIN if name in values and name not in given}
    found |= {name: policy for name, policy in policies(document).items() if name not in given}
    if "sinks" in values and "sinks" not in given:
        found["sinks"] = sinks(values["sinks"])
    if "where" not in given:
        found["where"] = location(document)
    return found


def policies(document: Document) -> dict[str, Any]:
    """Returns save, keep and memory, as far as the document has them."""
    values = document.values
    found: dict[str, Any] = {}
    if "save" in values:
        found["save"] = save_policy(values["save"])
    if "keep" in values:
        found["keep"] = keep_policy(values["keep"])
    if "memory" in values:
        found["memory"] = save_policy({**values["memory"], "end": False, "signal": False})
    return found


def save_policy(values: Mapping[str, Any]) -> SavePolicy:
    """Returns the policy of a table, which names at least one thing."""
    interval = {name: values[name] for name in _INTERVALS if name in values}
    parts = [every(**interval)] if interval else []
    parts += [on.improve(**one) for one in values.get("improve", ())]
    parts += [on.drop(**one) for one in values.get("drop", ())]
    parts += [on.end()] * values.get("end", True) + [on.signal()] * values.get("signal", True)
    return functools.reduce(operator.or_, parts)


def keep_policy(values: Mapping[str, Any]) -> KeepPolicy:
    made: Mapping[str, Callable[[Any], KeepPolicy]] = {
        "latest": keep.latest,
        "best": lambda tables: functools.reduce(operator.or_, (keep.best(**{"n": 1, **one}) for one in tables)),
        "every_steps": lambda steps: keep.every(steps=steps),
        "every_hours": lambda hours: keep.every(hours=hours),
        "within_hours": lambda hours: keep.within(hours=hours),
        "within_days": lambda days: keep.within(days=days),
        "within_weeks": lambda weeks: keep.within(weeks=weeks),
        **{name: functools.partial(_span, getattr(keep, name)) for name in _SPANS},
        "after": keep.after,
        "all": lambda _: keep.all(),
    }
    asked = [made[name](value) for name, value in values.items() if name in made and value is not False]
    policy = functools.reduce(operator.or_, asked) if asked else keep.all()
    if not values.keys() & set(_BUDGET):
        return policy
    return keep.limit(policy, **{argument: values[name] for name, argument in _BUDGET.items() if name in values})


def _span(make: Callable[[int | None], KeepPolicy], last: int | bool) -> KeepPolicy:
    return make(None if last is True else last)


def sinks(values: Mapping[str, Any]) -> list[JsonLines | LogSink | ProgressBar]:
    return [
        *([JsonLines(values["json_lines"])] if "json_lines" in values else []),
        *([ProgressBar()] if values.get("progress") else []),
        *([LogSink()] if values.get("logging") else []),
    ]


def location(document: Document) -> Where:
    """Returns what code would give as `where`."""
    values = document.values
    if "tiers" in values:
        tiers = []
        for one in values["tiers"]:
            more = {name: one[name] for name in _OF_TIER if name in one}
            if "save" in one:
                more["save"] = save_policy({**one["save"], "end": False, "signal": False})
            if "keep" in one:
                more["keep"] = keep_policy(one["keep"])
            tiers.append(_made("Tier", _one(one), **more))
        made: Where = _made("Tiers", *tiers, **{name: values[name] for name in ("copies", "node") if name in values})
        return made
    if values.get("kind") == "mirror":
        mirror: Where = _made("Mirror", *values["where"], copies=values.get("copies"))
        return mirror
    return _one(values)


def _one(values: Mapping[str, Any]) -> Where:
    where: Where = values["where"]
    if values.get("kind") == "stripe":
        where = _made("Stripe", *values["where"], **({"part": values["part"]} if "part" in values else {}))
    if "cache" in values:
        where = _made("Cached", where, **values["cache"])
    return where


def _made(name: str, /, *words: Any, **more: Any) -> Any:
    """Makes one of the locations' classes."""
    return getattr(import_module(_CLASSES[name]), name)(*words, **more)


def primary(document: Document) -> tuple[str, str] | None:
    """Returns the location that commands are given, from which they find the others, and the line that names it; None
    if the document names none."""
    document.check("where", "kind", "tiers")
    values = document.values
    tiers = enumerate(values.get("tiers", ()))
    place, one = next(((("tiers", number), tier) for number, tier in tiers if not tier.get("per_node")), ((), values))
    where = one.get("where")
    if where is None:
        return None
    if isinstance(where, list):
        where = f"stripe://{','.join(where)}" if one.get("kind") == "stripe" else where[0]
    return where, document.origin(*place, "where")


# What makes no sense together, each with the line to look at.


def check(document: Document, given: Collection[str] = ()) -> None:
    """Adds to the document's problems what its values contradict each other about."""
    values = document.values
    if "where" not in given:
        _check_locations(document)
    tables: list[tuple[Place, Any]] = [
        ((name,), values[name]) for name in ("save", "keep", "memory") if name in values and name not in given
    ]
    for number, tier in enumerate(values.get("tiers", ())):
        tables += [(("tiers", number, name), tier[name]) for name in ("save", "keep") if name in tier]
    for place, table in tables:
        _check_policy(document, place, table)
    aliases = ArgumentAliases(**{name: values[name] for name in _ALIASES if name in values})
    first = next((name for name in _ALIASES if name in values), "")
    checks: Mapping[str, Callable[[], object]] = {
        "run": lambda: run_key(values["run"]),
        "resume_from": lambda: checked_start(values["resume_from"]),
        first: lambda: aliases.policies(None, keep.all() if "keep" in values else None),
    }
    for name in checks.keys() & values.keys():
        try:
            checks[name]()
        except UsageError as error:
            document.add((name,), error.message, error.hint or f"leave {name} out")


def _check_policy(document: Document, place: Place, table: Mapping[str, Any]) -> None:
    name = dotted(place)
    if place[-1] == "keep":
        asked = [key for key, value in table.items() if value is not False]
        others = ", ".join(key for key in asked if key != "all" and key not in _BUDGET)
        if "all" in asked and others:
            document.add((*place, "all"), f"{name} keeps all, and {others} of it", "leave out one or the other")
        if not asked:
            document.add(place, f"{name} names nothing to keep", "latest = 3")
        if "budget" in table and "cost" in table:
            document.add((*place, "cost"), f"{name} has two budgets", "leave out budget or cost")
        if ("cost" in table) != ("cost_per_gib_month" in table):
            given = "cost" if "cost" in table else "cost_per_gib_month"
            hint = "cost = 100 and cost_per_gib_month = 0.023"
            document.add((*place, given), f"{name} needs both a cost and a price", hint)
    else:
        ends = place == ("save",) and any(table.get(key, True) for key in ("end", "signal"))
        if not ends and not any(value for key, value in table.items() if key not in ("end", "signal")):
            document.add(place, f"{name} never asks for a save", "steps = 1000")


def _check_locations(document: Document) -> None:
    values = document.values
    tiers = values.get("tiers", [])
    if not tiers:
        if "where" not in values and not any(one.place[:1] == ("where",) for one in document.problems):
            hint = 'where = "/shared/ckpts", or the variable TENUTO_WHERE'
            document.add((), f"{document.name} does not say where checkpoints go", hint)
        _check_location(document, (), values)
        mirrored = values.get("kind") == "mirror" and isinstance(values.get("where"), list)
        _check_copies(document, len(values["where"]) if mirrored else 1, "location")
        if "node" in values:
            document.add(("node",), "node names the node of tiers that are per_node, and there are none", "[[tiers]]")
        return
    main = next((tier for tier in tiers if not tier.get("per_node")), None)
    if "where" in values and (main is None or _identity(values["where"]) != _identity(main.get("where"))):
        document.add(("where",), "both where and tiers say where checkpoints go", "leave out one of them")
    for name in ("kind", "part", "cache"):
        if name in values:
            document.add(
                (name,), f"{name} belongs into the tier that it is for", f"put it below a [[tiers]]: {name} = …"
            )
    for number, tier in enumerate(tiers):
        place: Place = ("tiers", number)
        _check_location(document, place, tier)
        for name in ("where", "name"):
            before = [_identity(one[name]) for one in tiers[:number] if name in one]
            if name in tier and _identity(tier[name]) in before:
                document.add((*place, name), f"two tiers have the same {name}", f"another {name}, or one tier")
        if tier.get("per_node") and number:
            document.add((*place, "per_node"), "only the first tier can be per_node", "put it first: the fastest is")
    if main is None:
        document.add(
            ("tiers",), "every tier is per_node: checkpoints are committed in one that all ranks share",
            'add a [[tiers]] with where = "/shared/ckpts"',
        )  # fmt: skip
    if tiers[0].get("wait") is False:
        document.add(
            ("tiers", 0, "wait"), "saves wait for the first tier: they would be nowhere when they count as committed",
            "leave wait out, or put a tier before it",
        )  # fmt: skip
    _check_copies(document, sum(tier.get("wait", not number) for number, tier in enumerate(tiers)), "tier")
    if "node" in values and not any(tier.get("per_node") for tier in tiers):
        document.add(("node",), "node names the node of tiers that are per_node, and there are none", "per_node = true")


def _check_location(document: Document, place: Place, values: Mapping[str, Any]) -> None:
    where, kind = values.get("where"), values.get("kind")
    if isinstance(where, list):
        if kind is None:
            document.add((*place, "where"), "where lists several locations, and no kind says how", 'kind = "stripe"')
        elif len({_identity(one) for one in where}) < max(len(where), 2):
            hint = 'where = ["/nvme0/run", "/nvme1/run"]'
            document.add((*place, "where"), f"a {kind} needs two or more locations, each once", hint)
    elif kind is not None:
        document.add((*place, "kind"), f"a {kind} needs several locations", 'where = ["/nvme0/run", "/nvme1/run"]')
    if "part" in values and kind != "stripe":
        document.add((*place, "part"), "part is for a stripe", 'kind = "stripe"')


def _check_copies(document: Document, counted: int, what: str) -> None:
    copies = document.values.get("copies", 0)
    if copies > max(counted, 1):
        document.add(
            ("copies",), f"copies = {copies}, and saves wait for {count(counted, what)}", f"copies = {counted}"
        )


def _identity(where: object) -> object:
    """Returns the same for two spellings of one location."""
    if not isinstance(where, str):
        return where
    return where.rstrip("/") if "://" in where else os.path.realpath(os.path.expanduser(where))


def check_disks(document: Document) -> None:
    """Adds to the document's problems sizes that the file systems of this machine cannot hold, as far as they exist."""
    wanted: list[tuple[Place, object, int]] = []
    tables: list[tuple[Place, Any]] = [(("tiers", n), tier) for n, tier in enumerate(document.values.get("tiers", ()))]
    for above, values in [((), document.values), *tables]:
        if "capacity" in values:
            wanted.append(((*above, "capacity"), values.get("where"), values["capacity"]))
        if "limit" in values.get("cache", {}):
            wanted.append(((*above, "cache", "limit"), values["cache"].get("directory"), values["cache"]["limit"]))
    for place, where, nbytes in wanted:
        if isinstance(where, str) and os.path.isdir(os.path.expanduser(where)):
            total = shutil.disk_usage(os.path.expanduser(where)).total
            if total < nbytes:
                document.add(
                    place,
                    f"{dotted(place)} is {size(nbytes)}, and the file system of {where} has {size(total)} in all",
                    "a smaller one",
                )
