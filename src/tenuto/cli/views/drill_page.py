"""The outcome of a drill: as lines for people, as JSON, and as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from string import Template
from typing import TYPE_CHECKING, Any, Final

from tenuto.errors import typed
from tenuto.model.ids import attempt_key
from tenuto.units import count, seconds, size

if TYPE_CHECKING:
    from tenuto.drill.drill import DrillPlan, DrillResult, ProvenRestore

SHOWN: Final = 8
"""Wrong entries and metrics that are listed; --json has all of them."""


def headline(result: DrillResult) -> str:
    """Returns the outcome in one line."""
    plan = result.plan
    if not plan.due:
        return f"NOT DUE: {plan.last.id if plan.last else plan.id} was proven restorable {_age(result)}"
    if not result.proven:
        failed = "restore" if result.restore is None or not result.restore.ok else "resume"
        return f"NOT PROVEN: the {failed} of {plan.id} is not what was saved" + (
            "" if _differs(result) else ": it did not come about"
        )
    assert result.restore is not None
    took = f"in {seconds(result.restore.seconds)}"
    if result.slow:
        return f"PROVEN, TOO SLOW: {plan.id} was restored {took}, and {seconds(plan.target_s or 0)} were wanted"
    return f"PROVEN: {plan.id} was restored {took}, every byte and value as it was saved"


def _differs(result: DrillResult) -> bool:
    parts = [part for part in (result.restore, result.resume) if part is not None]
    return all(part.failure is None or part.failure.exit_code == _DAMAGE for part in parts)


_DAMAGE: Final = 12


def rows(result: DrillResult) -> list[tuple[str, str]]:
    """Returns what there is to say of it, most important first, in two columns."""
    return [
        ("" if number else name, line)
        for name, text in _rows(result)
        for number, line in enumerate(text.splitlines() or [""])
    ]


def _rows(result: DrillResult) -> Iterator[tuple[str, str]]:
    plan, restored, resumed = result.plan, result.restore, result.resume
    if not plan.due:
        return
    if restored is not None and restored.failure is not None:
        yield "failed", restored.failure.message
    elif restored is not None:
        for number, one in enumerate(restored.wrong[:SHOWN]):
            yield "" if number else "wrong", str(one)
        if len(restored.wrong) > SHOWN:
            yield "", f"and {len(restored.wrong) - SHOWN} more"
        target = "" if plan.target_s is None else f"; wanted within {seconds(plan.target_s)}"
        yield "restored", f"{size(restored.bytes)} in {seconds(restored.seconds)}, in a new process{target}"
        yield "loaded", f"{seconds(restored.load_s)} of it, {size(int(restored.rate))}/s"
        yield "compared", f"{count(restored.leaves, 'tensor')} and {count(restored.values, 'value')}"
    yield "from", plan.place
    if resumed is not None:
        yield from _resumed(result)
    if result.noted is not None:
        yield "noted", result.noted
    if not result.proven and result.before is not None:
        before = result.before
        yield "proven", f"{before.id}, {before.when[:16].replace('T', ' ')} UTC: the newest older one that was"
    elif not result.proven:
        yield "proven", f"no older checkpoint of run {plan.id.run} was"


def _resumed(result: DrillResult) -> Iterator[tuple[str, str]]:
    resumed = result.resume
    assert resumed is not None
    if resumed.failure is not None:
        yield "script", resumed.failure.message
        return
    wrong = [one for one in resumed.compared if not one.equal]
    for number, one in enumerate(wrong[:SHOWN]):
        logged = "nothing" if one.logged is None else repr(one.logged)
        yield "" if number else "differs", f"step {one.step}: {one.metric} {logged}, and {one.recorded!r} was recorded"
    many = len({one.step for one in resumed.compared})
    equal = f"{len(resumed.compared) - len(wrong)} of {count(len(resumed.compared), 'metric')} equal at"
    yield "script", f"{count(resumed.steps, 'step')} from step {resumed.began}; {equal} {count(many, 'recorded step')}"


def hint(result: DrillResult) -> str | None:
    """Returns what to do next; None if there is nothing."""
    plan = result.plan
    if result.proven or not plan.due:
        return None
    for part in (result.restore, result.resume):
        if part is not None and part.failure is not None and part.failure.hint:
            return part.failure.hint
    if result.resume is not None:
        return f"{typed('tenuto', 'certify', plan.where)} -- {typed(*plan.command)} finds what is not exact"
    step = f"{attempt_key(plan.id.attempt)}/{plan.id.step}"
    return f"{typed('tenuto', 'verify', plan.where, step, '--run', plan.id.run)} says where the damage is"


def plan_rows(plan: DrillPlan) -> list[tuple[str, str]]:
    """Returns what a drill would do."""
    found = [("checkpoint", str(plan.id)), ("from", plan.place)]
    if plan.target_s is not None:
        found.append(("target", seconds(plan.target_s)))
    if plan.command:
        found.append(("script", f"{typed(*plan.command)}, {count(plan.steps, 'step')} on a copy"))
        steps = ", ".join(str(step) for step in list(plan.recorded)[:SHOWN] if step <= plan.id.step + plan.steps)
        found.append(("compares", f"metrics of step {steps}"))
    if plan.last is not None:
        found.append(("last proof", f"{plan.last.id}, {plan.last.when}"))
    found.append(("due", "yes" if plan.due else "no"))
    return found


def plan_document(plan: DrillPlan) -> dict[str, Any]:
    """Returns what a drill would do as JSON."""
    return {
        "where": plan.where,
        "checkpoint": plan.id,
        "place": plan.place,
        "due": plan.due,
        "target_s": plan.target_s,
        "command": list(plan.command),
        "steps": plan.steps,
        "recorded": {str(step): dict(metrics) for step, metrics in plan.recorded.items()},
        "last_proof": _proof(plan.last),
    }


def _age(result: DrillResult) -> str:
    from tenuto.units import age

    last = result.plan.last
    ago = None if last is None else last.age_s(result.when)
    return "before" if ago is None else f"{age(max(ago, 0.0)) or '0 s'} ago"


def document(result: DrillResult) -> dict[str, Any]:
    """Returns the outcome as JSON."""
    plan, restored, resumed = result.plan, result.restore, result.resume
    return {
        "where": plan.where,
        "checkpoint": plan.id,
        "place": plan.place,
        "due": plan.due,
        "proven": result.proven,
        "target_s": plan.target_s,
        "slow": result.slow,
        "when": result.when,
        "host": result.host,
        "noted": result.noted,
        "restore": None
        if restored is None
        else {
            "seconds": restored.seconds,
            "load_seconds": restored.load_s,
            "bytes": restored.bytes,
            "bytes_per_second": restored.rate,
            "leaves": restored.leaves,
            "values": restored.values,
            "wrong": [
                {"path": one.path, "what": one.what, "saved": one.saved, "restored": one.restored, "rank": one.rank}
                for one in restored.wrong
            ],
            "failure": _failure(restored.failure),
        },
        "resume": None
        if resumed is None
        else {
            "command": list(resumed.command),
            "began": resumed.began,
            "steps": resumed.steps,
            "seconds": resumed.seconds,
            "tolerance": plan.tolerance,
            "compared": [
                {
                    "step": one.step,
                    "metric": one.metric,
                    "recorded": one.recorded,
                    "logged": one.logged,
                    "equal": one.equal,
                }
                for one in resumed.compared
            ],
            "failure": _failure(resumed.failure),
        },
        "last_proof": _proof(plan.last),
        "before": _proof(result.before),
        "exit_code": result.exit_code,
    }


def _failure(failure: Any) -> dict[str, Any] | None:
    return None if failure is None else {"kind": failure.kind, "message": failure.message, "hint": failure.hint}


def _proof(proof: ProvenRestore | None) -> dict[str, Any] | None:
    return (
        None
        if proof is None
        else {"checkpoint": proof.id, "when": proof.when, "place": proof.place, "host": proof.host}
    )


GENERATOR: Final = '<meta name="generator" content="tenuto drill">'
"""By which a page is known as one that may be replaced."""
_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
$generator
<title>$title</title>
<style>
:root { color-scheme: light dark; --good: #0a7a33; --bad: #b3261e; --dim: #666; --line: #ddd }
@media (prefers-color-scheme: dark) { :root { --good: #5fd38d; --bad: #ff8a80; --dim: #aaa; --line: #444 } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.25rem } h1.good { color: var(--good) } h1.bad { color: var(--bad) }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line) }
th { font-weight: 600; white-space: nowrap } td { overflow-wrap: anywhere; white-space: pre-wrap }
td.bad { color: var(--bad) } footer { color: var(--dim); font-size: .875rem }
</style>
<h1 class="$verdict">$headline</h1>
<table>$rows</table>
$metrics
<footer>$where, run $run, on $host, $when</footer>
</html>
""")


def html(result: DrillResult) -> str:
    """Returns the outcome as a page that loads nothing."""
    plan = result.plan
    pairs = rows(result)
    if hint_text := hint(result):
        pairs.append(("next", hint_text))
    return _PAGE.substitute(
        generator=GENERATOR,
        title=escape(f"Drill of {plan.id}"),
        headline=escape(headline(result)),
        verdict="good" if result else "bad",
        rows="".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in pairs),
        metrics=_metrics(result),
        where=escape(plan.where),
        run=escape(plan.id.run),
        host=escape(result.host),
        when=escape(result.when),
    )


def _metrics(result: DrillResult) -> str:
    compared = () if result.resume is None else result.resume.compared
    if not compared:
        return ""
    lines = [
        f'<tr><td>{one.step}</td><td>{escape(one.metric)}</td><td>{one.recorded!r}</td><td class="'
        f'{"" if one.equal else "bad"}">{"nothing" if one.logged is None else repr(one.logged)}</td></tr>'
        for one in compared
    ]
    head = "<tr><th>step</th><th>metric</th><th>recorded</th><th>now</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"
