"""Verdicts with their reasons, as whole tables: tests/golden/policy holds what a person is shown.

A line of a table is `attempt/step  walk  facts`; the same line comes back with its verdict. To look at a change, print
`table(...)` and compare; the files are edited by hand.
"""

from pathlib import Path

import pytest

from tenuto.model.ids import CheckpointId
from tenuto.policy import every, keep, on  # noqa: F401 - named by the tables
from tenuto.policy.keep import CheckpointFacts
from tenuto.policy.save import Moment, SaveHistory

GOLDEN = Path(__file__).parents[2] / "golden" / "policy"


def facts(line):
    name, place, *words = line.split("->")[0].split()
    attempt, step = name.split("/")
    given = dict(word.split("=", 1) for word in words if "=" in word)
    tags = tuple(given.pop("tags").split(",")) if "tags" in given else ()
    copied_to = given.pop("copied", "")
    created_s = created(given.pop("created")) if "created" in given else None
    forked_from, nbytes = given.pop("forked", ""), int(given.pop("bytes", 0))
    bases = tuple(CheckpointId("gpt", *map(int, base.split("/"))) for base in given.pop("on", "").split(",") if base)
    metrics = {key: float(value) for key, value in given.items() if key != "needed"}
    flags = {word.replace("-", "_"): True for word in words if "=" not in word}
    needed = tuple(w.split("=")[1].replace("_", " ") for w in words if w.startswith("needed="))
    walk = None if place == "-" else int(place)
    id = CheckpointId("gpt", int(attempt), int(step))
    more = {"created_s": created_s, "tags": tags, "needed_by": needed, "copied_to": copied_to, **flags}
    return CheckpointFacts(id, walk, metrics, bytes=nbytes, bases=bases, forked_from=forked_from, **more)


def created(text):
    """`day.hour` or `day.hour.minute`, counted from 1970 as the clock of the saving machine said it."""
    day, hour, minute = map(int, f"{text}.0".split(".")[:3])
    return (day * 24 + hour) * 3600.0 + minute * 60


def keep_table(policy, lines):
    verdicts = policy.decide([facts(line) for line in lines])
    return [f"{line.split('->')[0].rstrip():<36} -> {verdict}" for line, verdict in zip(lines, verdicts, strict=True)]


def moment(line, minutes):
    """`step  minute  words`; what is saved becomes history for the next line."""
    step, minute, *words = line.split("->")[0].split()
    given = {"ending": "ending" in words, "epoch_ended": "epoch-ended" in words}
    for key, _, value in (word.partition("=") for word in words):
        if key in ("epoch", "signal"):
            given[key] = int(value) if key == "epoch" else value
        elif value:
            given.setdefault("metrics", {})[key] = float(value)
    return Moment(step=int(step), now_s=float(minute) * minutes, **given)


def save_table(policy, lines):
    out, history, saved = [], SaveHistory(started_s=0.0), []
    for line in lines:
        now = moment(line, 60.0)
        decision = policy.decide(now, history)
        if decision.save:
            saved = [*saved, now.metrics]
            history = SaveHistory(started_s=0.0, last_saved_step=now.step, last_saved_s=now.now_s, saved=saved)
        verdict = f"{'saved' if decision.save else 'not saved'}: {decision.reason}"
        out.append(f"{line.split('->')[0].rstrip():<36} -> {verdict}")
    return out


def table(text):
    head, *lines = text.splitlines()
    policy = eval(head)
    judge = save_table if hasattr(policy, "wants") else keep_table
    return "\n".join([head, *judge(policy, lines)]) + "\n"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_golden(path):
    text = path.read_text()
    assert table(text) == text
