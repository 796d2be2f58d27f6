"""The settings file: what it says is what code says, and what is wrong with it has a line."""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenuto
from tenuto import every, keep, on
from tenuto.errors import PolicyConflict, UsageError
from tenuto.training.config import objects
from tenuto.training.config.document import Document, document, dotted, find, lines
from tenuto.training.config.keys import KEYS, Key, Table, flat

EXAMPLE = Path(__file__).parents[3] / "examples/tenuto.toml"


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TENUTO_WHERE", "TENUTO_LOG", "TENUTO_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locations are shown as what makes them."""
    monkeypatch.setattr(objects, "_made", lambda name, /, *words, **more: (name, words, more))


def written(text: str, name: str = "tenuto.toml") -> Path:
    Path(name).write_text(text)
    return Path(name).absolute()


def read(text: str, **environment: str) -> Document:
    return document(written(text), environment)


def arguments(text: str, **environment: str) -> dict[str, Any]:
    return objects.arguments(read(text, **environment))


def problems(text: str, **environment: str) -> list[str]:
    found = read(text, **environment)
    objects.check(found)
    return list(map(str, found.problems))


# What it says.


def state() -> dict[str, Any]:
    return {"x": np.zeros(4)}


def test_a_training_reads_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    written('where = "ckpts"\nrun = "gpt"\n[save]\nsteps = 2\nsignal = false\n[keep]\nall = true\n')
    with tenuto.Checkpointer.from_config(state()) as ckpt:
        for _ in ckpt.steps(5):
            pass
    there = tenuto.Repository("ckpts")
    assert [id.step for id in there.checkpoints("gpt")] == [5, 4, 2]
    monkeypatch.setenv("TENUTO_SAVE__STEPS", "3")
    Path("deeper").mkdir()
    monkeypatch.chdir("deeper")  # the file is found above, and its paths begin there
    with tenuto.Checkpointer.from_config(state(), save=every(steps=4) | on.end()) as ckpt:
        for _ in ckpt.steps(10):
            pass
    assert [id.step for id in there.checkpoints("gpt")] == [10, 8, 5, 4, 2]
    with tenuto.Checkpointer.from_config(state()) as ckpt:
        for _ in ckpt.steps(13):
            pass
    assert [id.step for id in there.checkpoints("gpt")] == [13, 12, 10, 8, 5, 4, 2]


def test_the_environment_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENUTO_WHERE", "ckpts")
    with tenuto.Checkpointer.from_config(state(), run="b") as ckpt:
        for _ in ckpt.steps(1):
            pass
    assert tenuto.Repository("ckpts").runs() == ["b"]


def test_the_file_is_the_argument_the_variable_or_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above = written('where = "a"\n')
    Path("x/y").mkdir(parents=True)
    monkeypatch.chdir("x/y")
    assert find() == above
    other = written("", "other.toml")
    monkeypatch.setenv("TENUTO_CONFIG", "other.toml")
    assert find() == other
    assert find("mine.toml") == tmp_path / "x/y/mine.toml"


def test_no_file_and_no_location_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"does not say where checkpoints go\n  hint: where = "):
        tenuto.Checkpointer.from_config(state())


def test_the_state_in_the_place_of_the_file_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"is a path, not a dict\n  hint: Checkpointer.from_config\(state, "):
        tenuto.Checkpointer.from_config("tenuto.toml", state())  # type: ignore[arg-type]


def test_every_key_has_what_code_would_say() -> None:
    text = """
    where = "ckpts"
    resume_from = false
    memory_budget = "8GiB"
    wait_for_owner = 60
    ranks_silence = 30
    takeover = true
    [save]
    steps = 1000
    minutes = 30
    hours = 2
    epochs = 1
    stall = "1%"
    improve = [{ metric = "val_loss", by = "5%" }, { metric = "acc", mode = "max" }]
    drop = { metric = "loss", by = 0.5 }
    signal = false
    [keep]
    latest = 3
    best = [{ metric = "val_loss" }, { metric = "acc", n = 2, mode = "max" }]
    every_steps = 500
    every_hours = 24
    within_days = 2
    daily = 7
    weekly = true
    [memory]
    steps = 1
    """
    assert arguments(text) == {
        "where": "ckpts",
        "resume_from": None,
        "memory_budget": 8 * 2**30,
        "wait_for_owner": 60,
        "ranks_silence": 30,
        "takeover": True,
        "save": every(steps=1000, minutes=30, hours=2, epochs=1, stall="1%")
        | on.improve("val_loss", by="5%")
        | on.improve("acc", mode="max")
        | on.drop("loss", by=0.5)
        | on.end(),
        "keep": keep.latest(3)
        | (keep.best(1, "val_loss") | keep.best(2, "acc", mode="max"))
        | keep.every(steps=500)
        | keep.every(hours=24)
        | keep.within(days=2)
        | keep.daily(7)
        | keep.weekly(),
        "memory": every(steps=1),
    }


def test_what_is_left_out_is_left_to_the_checkpointer() -> None:
    assert arguments('where = "/ckpts"') == {"where": "/ckpts"}


def test_end_and_signal_are_part_of_every_save_unless_refused() -> None:
    assert arguments('where = "x"\n[save]\nsteps = 5')["save"] == every(steps=5) | on.end() | on.signal()
    assert arguments('where = "x"\n[save]\nsignal = false')["save"] == on.end()


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('where = ["/a", "/b"]\nkind = "mirror"\ncopies = 1', ("Mirror", ("/a", "/b"), {"copies": 1})),
        ('where = ["/a", "/b"]\nkind = "stripe"\npart = "1MiB"', ("Stripe", ("/a", "/b"), {"part": 2**20})),
        (
            'where = "s3://b/x"\n[cache]\ndirectory = "/c"\nlimit = "50GB"',
            ("Cached", ("s3://b/x",), {"directory": "/c", "limit": 50 * 10**9}),
        ),
    ],
)
@pytest.mark.usefixtures("made")
def test_several_locations_as_one(text: str, where: object) -> None:
    assert arguments(text)["where"] == where


@pytest.mark.usefixtures("made")
def test_the_settings_of_a_large_job_are_what_code_would_say(monkeypatch: pytest.MonkeyPatch) -> None:
    found = objects.arguments(document(EXAMPLE, {}))
    (sink,) = found.pop("sinks")
    assert sink._path == str(EXAMPLE.parent / "events.jsonl")
    nvme = ("Stripe", ("/nvme0/ckpts", "/nvme1/ckpts"), {"part": 8 * 2**20})
    cold = ("Cached", ("s3://llm-ckpts/70b",), {"directory": "/nvme0/cache", "limit": 500 * 10**9})
    tiers = (
        ("Tier", (nvme,), dict(name="nvme", per_node=True, wait=True, capacity=2 * 10**12, keep=keep.within(days=0.5))),
        (
            "Tier",
            ("/shared/llm/ckpts",),
            dict(name="shared", capacity=40 * 10**12, keep=keep.latest(5) | keep.daily(7)),
        ),
        (
            "Tier",
            (cold,),
            dict(
                name="cold",
                bandwidth=2 * 10**9,
                save=every(steps=10_000, hours=6),
                keep=keep.daily(30) | keep.weekly(),
            ),
        ),
    )
    assert found == dict(
        where=("Tiers", tiers, {"copies": 1}),
        run="llm-70b",
        resume_from="latest",
        in_flight=2,
        on_busy="wait",
        on_error="warn",
        takeover=False,
        wait_for_owner=120,
        memory_budget=400 * 10**9,
        capture="fenced",
        health=True,
        ranks_timeout=1800,
        ranks_silence=30,
        writers="balanced",
        emergency="/nvme-shared/emergency",
        emergency_after=10,
        log="saves",
        save=every(steps=1000, minutes=30)
        | on.improve("val_loss", by="0.5%")
        | on.drop("loss", by="10%")
        | on.end()
        | on.signal(),
        keep=keep.limit(
            keep.latest(3)
            | (keep.best(2, "val_loss") | keep.best(1, "accuracy", mode="max"))
            | keep.every(steps=50_000)
            | keep.every(hours=48)
            | keep.within(days=1)
            | keep.hourly(24)
            | keep.daily(14)
            | keep.weekly()
            | keep.monthly(12)
            | keep.yearly(10)
            | keep.after("fork"),
            bytes=20 * 10**12,
        ),
        memory=every(steps=20),
    )


def test_the_settings_of_a_large_job_have_every_key_once() -> None:
    text = EXAMPLE.read_text()
    for name, key in flat():
        word = name.rpartition(".")[2]
        assert re.search(rf"(^|[{{,\[# ]|\[\[|tiers\.){word}( =|\])", text, re.M), name
        if isinstance(key, Key) and "." not in name and name != "part":
            assert re.search(rf"^(# )?{word} =", text.partition("\n[save]\n")[0], re.M), name


def test_tiers_of_a_file_take_a_training(tmp_path: Path) -> None:
    pytest.importorskip("tenuto.repo.replicated.tiers")
    written(
        '[save]\nsteps = 2\n[[tiers]]\nwhere = "fast"\n[[tiers]]\nname = "slow"\nwhere = "slow"\nkeep = {latest = 9}\n'
    )
    with tenuto.Checkpointer.from_config(state()) as ckpt:
        for _ in ckpt.steps(4):
            pass
    assert tenuto.load("fast").step == tenuto.load("slow").step == 4


# Every argument has a key, and every key an argument.

NOT_SAID = {
    "Checkpointer.state": "objects of the script",
    "Checkpointer.data": "an object of the script",
    "Checkpointer.ranks": "each process's own rank",
    "Tier.encoding": "refused",
}
CLASSES = {
    "Checkpointer": (tenuto.Checkpointer, ()),
    "every": (every, ()),
    "on.improve": (on.improve, ()),
    "on.drop": (on.drop, ()),
    "keep.latest": (keep.latest, ()),
    "keep.best": (keep.best, ()),
    "keep.every": (keep.every, ()),
    "keep.within": (keep.within, ()),
    "keep.daily": (keep.daily, ()),
    "keep.weekly": (keep.weekly, ()),
    "keep.hourly": (keep.hourly, ()),
    "keep.monthly": (keep.monthly, ()),
    "keep.yearly": (keep.yearly, ()),
    "keep.after": (keep.after, ()),
    "keep.limit": (keep.limit, ()),
    "JsonLines": (tenuto.telemetry.JsonLines, ()),
    **{name: (home, ()) for name, home in objects._CLASSES.items()},
}
OF_PLACES = {
    "keep.limit": {"policy"},
    "Mirror": {"places"},
    "Stripe": {"places"},
    "Tiers": {"tiers"},
    "Cached": {"where"},
}
"""Arguments that are the list `where`, or what the key is in."""


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_has_a_key_and_every_key_an_argument(name: str) -> None:
    what: Any = CLASSES[name][0]
    if isinstance(what, str):
        what = getattr(pytest.importorskip(what), name)
    there = set(inspect.signature(what).parameters) - OF_PLACES.get(name, set())
    said = {
        one.rpartition(".")[2] for _, key in flat() for one in key.argument.split() if one.rpartition(".")[0] == name
    }
    assert there == said | {one.partition(".")[2] for one in NOT_SAID if one.startswith(f"{name}.")}


def test_every_policy_has_a_key() -> None:
    said = {one.partition(".")[2].partition(".")[0] for _, key in flat() for one in key.argument.split()}
    for module in (keep, on):
        public = {
            name for name, one in vars(module).items() if inspect.isfunction(one) and one.__module__ == module.__name__
        }
        assert public - {"protections", "worth_a_grace", "recorded", "metric_name", "min_or_max"} - said <= {
            name for name in public if name.startswith("_")
        }


def test_defaults_are_those_of_the_signatures() -> None:
    parameters = inspect.signature(tenuto.Checkpointer).parameters
    for key in KEYS:
        if isinstance(key, Key) and key.default and key.argument.startswith("Checkpointer."):
            default = parameters[key.name].default
            assert tomllib.loads(f"x = {key.default}")["x"] == ("default" if key.name == "log" else default), key.name


@pytest.mark.parametrize(("name", "argument"), [("Stripe", "part"), ("Cached", "limit"), ("Tier", "per_node")])
def test_defaults_of_locations_are_those_of_the_signatures(name: str, argument: str) -> None:
    parameters = inspect.signature(getattr(pytest.importorskip(objects._CLASSES[name]), name)).parameters
    (default,) = {key.default for _, key in flat() if key.argument == f"{name}.{argument}"}
    assert tomllib.loads(f"x = {default}")["x"] == parameters[argument].default


def test_choices_are_those_of_the_signatures() -> None:
    hints = get_type_hints(tenuto.Checkpointer.__init__, vars(import_module("tenuto.training.checkpointer")))
    for name in ("on_busy", "on_error", "capture", "writers"):
        key = next(key for key in KEYS if key.name == name)
        assert isinstance(key, Key)
        assert set(re.findall(r'"(\w+)"', key.kind.name)) == set(get_args(hints[name]))


def test_every_key_is_documented() -> None:
    for name, key in flat():
        assert key.about and key.argument, name
        assert isinstance(key, Table) or (
            key.reason and key.kind.read(tomllib.loads(f"x = {key.kind.example}")["x"]) is not None
        )
        assert (
            isinstance(key, Table)
            or not key.default
            or key.kind.read(tomllib.loads(f"x = {key.default}")["x"]) is not None
        )


# What is wrong with it.


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sav = 3", "tenuto.toml:2: there is no key sav"),
        ("[save]\nstep = 3", "tenuto.toml:3: there is no key save.step"),
        ("[save]\nsteps = 2.5", "tenuto.toml:3: save.steps = 2.5 is not a whole number of at least 1"),
        ("[save]\nsteps = true", "tenuto.toml:3: save.steps = true is not a whole number of at least 1"),
        ('run = 3', "tenuto.toml:2: run = 3 is not text"),
        ('on_busy = "stop"', 'tenuto.toml:2: on_busy = "stop" is not "wait" or "skip"'),
        ('memory_budget = "many"', 'tenuto.toml:2: memory_budget = "many" is not a size with its unit, 1 MiB or more'),
        ("memory_budget = 500", "tenuto.toml:2: memory_budget = 500 is not a size with its unit, 1 MiB or more"),
        ("save = 100", "tenuto.toml:2: save is not a table"),
        ("tiers = 1", "tenuto.toml:2: tiers is not an array of tables"),
        ("[[keep]]\nlatest = 1", "tenuto.toml:2: keep is not a table"),
        ("[save]\nimprove = [\n  {by = 1},\n]", "tenuto.toml:3: save.improve[0] has no metric"),
        ("[save]\nend = false\nsignal = false", "tenuto.toml:2: save never asks for a save"),
        ("[memory]", "tenuto.toml:2: memory never asks for a save"),
        ("[keep]\nall = false", "tenuto.toml:2: keep names nothing to keep"),
        ('[keep]\nlatest = 2\nbudget = "1TB"\ncost = 3', "tenuto.toml:5: keep has two budgets"),
        ("[keep]\nlatest = 2\ncost = 3", "tenuto.toml:4: keep needs both a cost and a price"),
        ("[keep]\ncost_per_gib_month = 0.02", "tenuto.toml:3: keep needs both a cost and a price"),
        ("[keep]\nlatest = 2\nall = true", "tenuto.toml:4: keep keeps all, and latest of it"),
        ('run = "a/b"', "tenuto.toml:2: "),
        ('resume_from = "b!"', "tenuto.toml:2: resume_from='b!' is neither 'latest', a step"),
        ("max_to_keep = 3\n[keep]\nlatest = 1", "tenuto.toml:2: max_to_keep=3: keep="),
        ("copies = 2", "tenuto.toml:2: copies = 2, and saves wait for 1 location"),
        ('part = "1MiB"', "tenuto.toml:2: part is for a stripe"),
        ('kind = "mirror"', "tenuto.toml:2: a mirror needs several locations"),
        ('node = "a"', "tenuto.toml:2: node names the node of tiers that are per_node"),
        ('[[tiers]]\nwhere = "/b"', "tenuto.toml:1: both where and tiers say where checkpoints go"),
        ("[tiers]\n[tiers.keep]\nlatest = 1", "tenuto.toml:2: tiers[0] has no where"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_has_its_line(text: str, problem: str) -> None:
    found = problems(f'where = "/a"\n{text}\n')
    assert found and found[0].startswith(problem), found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('where = ["/a", "/b"]', ":1: where lists several locations, and no kind says how"),
        ('where = ["/a", "/a/"]\nkind = "stripe"', ":1: a stripe needs two or more locations, each once"),
        ('where = ["/a", "/b"]\nkind = "mirror"\ncopies = 3', ":3: copies = 3, and saves wait for 2 locations"),
        ('[[tiers]]\nwhere = "/a"\nper_node = true', ":1: every tier is per_node"),
        ('[[tiers]]\nwhere = "/a"\nwait = false\n[[tiers]]\nwhere="/b"', ":3: saves wait for the first tier"),
        ('[[tiers]]\nwhere = "/a"\n[[tiers]]\nwhere="/b"\nper_node=true', ":5: only the first tier can be per_node"),
        ('[[tiers]]\nwhere = "/a"\n[[tiers]]\nwhere="/a/"', ":4: two tiers have the same where"),
        (
            'copies = 2\n[[tiers]]\nwhere = "/a"\n[[tiers]]\nwhere="/b"',
            ":1: copies = 2, and saves wait for 1 tier",
        ),
        ('[[tiers]]\nwhere = "/a"\ncapacity = "10kB"', ':3: tiers[0].capacity = "10kB" is not a size with its unit'),
        ('[[tiers]]\nwhere = "/a"\nbandwidth = "200MB"', ':3: tiers[0].bandwidth = "200MB" is not a rate'),
        (
            '[[tiers]]\nwhere = "/a"\n[[tiers]]\nwhere = "/b"\nencoding = "small"',
            ":5: there is no key tiers[1].encoding: a tier stores each checkpoint as the primary does",
        ),
        ('[[tiers]]\nwhere = "/a"\n[tiers.keep]\nlatest = 0', ":4: tiers[0].keep.latest = 0 is not a whole number"),
        ('[cache]\ndirectory = "/c"\n[[tiers]]\nwhere = "/a"', ":1: cache belongs into the tier that it is for"),
    ],
)
def test_locations_that_make_no_sense_have_their_line(text: str, problem: str) -> None:
    found = problems(text)
    assert found and found[0].startswith(f"tenuto.toml{problem}"), found


def test_a_size_beyond_the_disk_is_refused_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects.shutil, "disk_usage", lambda path: SimpleNamespace(total=200 * 2**30))
    Path("disk").mkdir()
    found = read(
        '[[tiers]]\nwhere = "disk"\ncapacity = "500GiB"\ncache = { directory = "disk", limit = "201GiB" }\n'
        '[[tiers]]\nwhere = "not-here"\ncapacity = "500GiB"\n[[tiers]]\nwhere = "s3://b/x"\ncapacity = "500GiB"\n'
    )
    objects.check_disks(found)
    assert list(map(str, found.problems)) == [
        "tenuto.toml:3: tiers[0].capacity is 500 GiB, and the file system of disk has 200 GiB in all",
        "tenuto.toml:4: tiers[0].cache.limit is 201 GiB, and the file system of disk has 200 GiB in all",
    ]


def test_the_nearest_key_is_named() -> None:
    found = read('where = "/a"\n[keep]\ndayly = 3')
    assert [one.hint for one in found.problems] == ["did you mean 'daily'?"]


def test_a_training_stops_at_the_first_and_counts_the_rest() -> None:
    written('where = "/a"\nsaev = 1\nrunn = "b"\n')
    with pytest.raises(UsageError, match=r"^tenuto.toml:2: there is no key saev \(and 1 more: tenuto config check\)"):
        tenuto.Checkpointer.from_config(state())


def test_names_of_other_libraries_contradict_keep_as_in_code() -> None:
    with pytest.raises(PolicyConflict):
        tenuto.Checkpointer.from_config(state(), written('where = "a"\nmax_to_keep = 2\n'), keep=keep.latest(1))


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAX:hush@bucket/x",
        "https://user:hush@host/x",
        "https://host/x?X-Amz-Signature=hush",
        "az://container/x?sv=1&sig=hush",
        "s3://bucket/x?aws_secret_access_key=hush",
    ],
)
def test_a_credential_is_refused_and_not_repeated(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    written(f'where = "{url}"\n')
    with pytest.raises(UsageError, match="where holds what looks like a credential") as caught:
        tenuto.Checkpointer.from_config(state())
    assert "hush" not in str(caught.value) and "hush" not in repr(caught.value)
    (problem,) = problems("", TENUTO_WHERE=url)
    assert problem == "TENUTO_WHERE: where holds what looks like a credential"


@pytest.mark.parametrize("url", ["abfss://data@account.dfs.core.windows.net/x", "hdfs://me@node:8020/x", "/a?key=1"])
def test_what_is_no_credential_is_taken(url: str) -> None:
    assert arguments(f'where = "{url}"') == {"where": url}


def test_no_key_holds_a_secret() -> None:
    (one,) = read('where = "s3://b/x"\nsecret_access_key = "hush"\n').problems
    assert one.hint.startswith("no key holds a secret: credentials come from") and "hush" not in str(one)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"where = ", "is not TOML: Invalid value"),
        (b"\xff", "is not TOML: 'utf-8' codec"),
        (None, "cannot be read: No such"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(text: bytes | None, why: str) -> None:
    if text is not None:
        Path("tenuto.toml").write_bytes(text)
    with pytest.raises(UsageError, match=f"the settings file tenuto.toml {why}"):
        tenuto.Checkpointer.from_config(state(), "tenuto.toml")


# The environment.


@pytest.mark.usefixtures("made")
def test_a_variable_overrides_a_key_at_any_depth() -> None:
    text = 'run = "a"\n[save]\nsteps = 5\n[[tiers]]\nwhere = "/a"\nname = "fast"\n[[tiers]]\nwhere = "/b"\n'
    found = arguments(
        text,
        TENUTO_RUN="7",  # text, though it looks like a number
        TENUTO_SAVE__STEPS="9",
        TENUTO_SAVE__IMPROVE='[{metric = "loss", by = "5%"}]',
        TENUTO_KEEP__LATEST="2",
        TENUTO_RESUME_FROM="best:loss",
        TENUTO_TIERS__FAST__CAPACITY="1TB",
        TENUTO_TIERS__1__KEEP__DAILY="true",
        TENUTO_LOG="",
    )
    assert found["run"] == "7" and found["resume_from"] == "best:loss" and found["keep"] == keep.latest(2)
    assert found["save"] == every(steps=9) | on.improve("loss", by="5%") | on.end() | on.signal()
    assert found["where"][1] == (
        ("Tier", ("/a",), {"name": "fast", "capacity": 10**12}),
        ("Tier", ("/b",), {"keep": keep.daily()}),
    )


def test_a_path_of_a_variable_begins_where_one_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = written('where = "ckpts"\n[sinks]\njson_lines = "events"\n')
    Path("x").mkdir()
    monkeypatch.chdir("x")
    found = objects.arguments(document(path, {"TENUTO_SINKS__JSON_LINES": "mine"}))
    assert found["where"] == str(tmp_path / "ckpts") and found["sinks"][0]._path == "mine"


def test_a_misspelt_variable_is_refused_and_somebody_elses_is_not() -> None:
    assert problems('where = "/a"', TENUTO_SAVE__STEP="3", TENUTO_SVAE="1", TENUTO_ZZZ="1", TENUTO_CERTIFY="{}") == [
        "TENUTO_SAVE__STEP: there is no key save.step",
        "TENUTO_SVAE: there is no key svae",
    ]
    (one,) = read('where = "/a"', TENUTO_SAVE_STEPS="3").problems
    assert one.hint.startswith("did you mean TENUTO_SAVE__STEPS, ")
    assert problems('[[tiers]]\nwhere = "/a"', TENUTO_TIERS__NVME__CAPACITY="1TB") == [
        "TENUTO_TIERS__NVME__CAPACITY: there is no key tiers.nvme"
    ]


def test_a_location_of_the_environment_does_not_drop_tiers_silently() -> None:
    tiers = '[[tiers]]\nwhere = "/a"\n[[tiers]]\nwhere = "/b"\n'
    assert problems(tiers, TENUTO_WHERE="/c") == ["TENUTO_WHERE: both where and tiers say where checkpoints go"]
    assert problems(tiers, TENUTO_WHERE="/a/") == []  # the primary, for commands


def test_every_value_says_where_it_came_from() -> None:
    found = read('where = "/a"\n[keep]\nbest = [\n  {metric = "x"},\n]\n', TENUTO_SAVE__STEPS="5")
    origins = {one.name: (one.text, one.origin) for one in found.shown()}
    assert origins["where"] == ('"/a"', "tenuto.toml:1")
    assert origins["keep.best[0].metric"] == ('"x"', "tenuto.toml:3")
    assert origins["save.steps"] == ("5", "TENUTO_SAVE__STEPS")
    assert origins["save.end"] == ("true", "default")
    assert origins["run"] == ('"main"', "default")
    assert origins["memory"] == ("never", "default")


# Lines.

NAMES = st.sampled_from(["a", "b", '"c d"', "e.f", "'#'"])
VALUES = st.sampled_from(
    [
        "1",
        '"x"',
        "'''\nmore = 1\n[no]\n'''",
        '[\n  1, # "]"\n  2,\n]',
        "{ k = 1, l = [{ m = 2 }] }",
        '"""\\\n  x"""',
        "true",
    ]
)
STATEMENTS = st.tuples(NAMES, VALUES).map(lambda pair: f"{pair[0]} = {pair[1]}")
HEADERS = st.sampled_from(["[t]", "[t.u]", "[[v]]", "[v.w]", "[[v.x]]", "  [ y ] # z", "# c = 1", ""])


@settings(max_examples=200, deadline=None)
@given(st.lists(STATEMENTS | HEADERS, max_size=8))
def test_each_line_is_that_of_its_value(statements: list[str]) -> None:
    """Taking away what comes after the line on which a value ends leaves it; taking the line away too does not."""
    text = "\n".join(statements)
    try:
        whole = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    found = lines(text)
    assert {dotted(place) for place in found} >= {dotted(place) for place in leaves(whole)}
    rows = text.split("\n")
    for place in leaves(whole):
        assert not has(tomllib.loads("\n".join(rows[: found[place] - 1])), place)
        rest = range(found[place], len(rows) + 1)
        assert any(has(parsed(rows[:stop]), place) for stop in rest)


def leaves(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(value, dict | list):
        return [above]
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [place for name, one in pairs for place in leaves(one, (*above, name))]


def has(value: Any, place: tuple[Any, ...]) -> bool:
    for step in place:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def parsed(rows: list[str]) -> Any:
    try:
        return tomllib.loads("\n".join(rows))
    except tomllib.TOMLDecodeError:
        return {}
