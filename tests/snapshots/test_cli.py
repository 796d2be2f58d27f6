"""All that the commands print, whole, in every way of being looked at, against the text files in `cli/`.

`pytest tests/snapshots --update-snapshots` writes them anew; the difference is to be read like any other.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import tenuto
from snapshots import fixed
from snapshots.screen import Shown, on_pipes, on_terminal
from tenuto.cli.application import COMMANDS
from tenuto.cli.console.output import COPIED, cells

HERE = Path(__file__).parent / "cli"
RULES = (
    (re.compile(r"\bin \d[\d.]* (?:us|ms|s|min \d+ s)(?=[\s);.]|$)", re.M), "in <duration>"),
    (re.compile(r'"(seconds|left_s|oldest_s)": \d[\d.e-]*'), r'"\1": "<seconds>"'),
    (re.compile(r'"(free_before|free_after)": \d+'), r'"\1": "<bytes>"'),
    (re.compile(r"\S+ [KMGTP]iB free there now, \S+ [KMGTP]iB before"), "<bytes> free there now, <bytes> before"),
    (re.compile(r'"(beat_s|bytes_per_s)": \d[\d.e-]*'), r'"\1": "<number>"'),
    (re.compile(r"last beat [\w ]+ ago"), "last beat <age> ago"),
    (re.compile(r"((?: +\d+){4} +[\d.]+ [KMG]?i?B +)[\d.]+ (?:us|ms|s) +[\d.]+ [KMG]iB/s"), r"\1<time>  <rate>"),
    (re.compile(r"SIZE +TIME +RATE"), "SIZE  TIME  RATE"),
    (re.compile(r"\.html  [\d.]+ [KM]iB"), ".html  <size>"),
    (re.compile(r'"version": "[^"]*",\n  "runs"'), '"version": "<version>",\n  "runs"'),
    (re.compile(r'"free": \d+'), '"free": "<bytes>"'),
    (re.compile(r"\bcopies/[0-9a-f]{12}-"), "copies/<place>-"),
    (re.compile(r"kept until \d\d-\d\d \d\d:\d\d"), "kept until 01-03 04:05"),
    (re.compile(r"^tenuto \d+\.\d+\S*$", re.M), "tenuto <version>"),
)
"""What no fixed clock and no fixed id can make equal; everything else is compared as it is."""

EVERY = "wide narrow pipes json"

Prepare = Callable[[Path], None]


def nothing(where: Path) -> None:
    """Leaves everything as it was made."""


@dataclass(frozen=True)
class Case:
    """A command line, in a copy of the fixed places, after `prepare`. `ways`: see `looks`."""

    name: str
    words: tuple[str, ...]
    prepare: Prepare = nothing
    answer: bytes = b""
    ways: str = "narrow json"

    def typed(self, way: str) -> tuple[str, ...]:
        """With --json where it is asked for; what follows `--` is another program's."""
        end = self.words.index("--") if "--" in self.words else len(self.words)
        return self.words if way != "json" else (*self.words[:end], "--json", *self.words[end:])

    @property
    def changes(self) -> bool:
        """Whether it needs places of its own."""
        return self.prepare is not nothing or (not self.looks_only and "--help" not in self.words)

    @property
    def looks_only(self) -> bool:
        return not self.words or self.words[0] in (
            "ls",
            "log",
            "show",
            "compare",
            "diff",
            "status",
            "verify",
            "--help",
            "--version",
        )


def case(name: str, line: str, prepare: Prepare = nothing, **more: Any) -> Case:
    return Case(name, tuple(line.split()), prepare, **more)


def trained_by_another_tool(where: Path) -> None:
    """Three checkpoints of another tool in `out`, one of them damaged, and an archive of numpy."""
    for step in (100, 200, 300):
        place = where / "out" / f"checkpoint-{step}"
        place.mkdir(parents=True)
        arrays = {"module.w": np.full((8, 4), step, np.float32), "module.b": np.zeros(8, np.float32)}
        save_file(arrays, place / "model.safetensors")
        history = [{"step": step, "loss": 10 / step}]
        (place / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}))
        (place / "training_args.bin").write_bytes(b"a pickle")
    np.savez(where / "x.npz", w=np.arange(6.0))


def and_one_is_damaged(where: Path) -> None:
    trained_by_another_tool(where)
    with (where / "out/checkpoint-200/model.safetensors").open("r+b") as file:
        file.truncate(150)


def copied_elsewhere(where: Path) -> None:
    """A copy in `copy`, from before the newest checkpoint, with one bit of a manifest flipped."""
    repository = tenuto.Repository(where / "checkpoints")
    newest = repository.checkpoints("gpt")[0]
    (where / "checkpoints" / newest.directory).rename(where / "newest")
    repository.replicate(where / "copy")
    (where / "newest").rename(where / "checkpoints" / newest.directory)
    path = where / "copy" / repository.checkpoints("gpt")[1].manifest
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def primary_lost(where: Path) -> None:
    copied_elsewhere(where)
    shutil.rmtree(where / "checkpoints")


def damaged(where: Path) -> None:
    """One bit of the newest pack, and one manifest that is none."""
    pack = where / "checkpoints/runs/gpt/a0002/step-00000007/rank-00000.safetensors"
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    (where / "checkpoints/runs/gpt/a0001/step-00000006/manifest.json").write_bytes(b"?")


def damaged_beside_a_copy(where: Path) -> None:
    shutil.copytree(where / "checkpoints", where / "copy")
    damaged(where)


def all_damaged(where: Path) -> None:
    for pack in where.glob("checkpoints/runs/gpt/*/*/rank-00000.safetensors"):
        pack.write_bytes(pack.read_bytes()[:5000])


def rolled_back(where: Path) -> None:
    """Back behind the line that was left behind, forked, pinned and noted."""
    repository = tenuto.Repository(where / "checkpoints")
    with fixed.fixed_identity():
        repository.rollback("a0001/6", run="gpt", reason="the loss of the other line is from a broken data set")
        repository.fork("a0001/4", "warm", run="gpt", reason="a lower rate")
        repository.pin("a0001/4", run="gpt", reason="figure 3")
        repository.hold("a0001/4", run="gpt")
        repository.note("a0002/7", "evaluated by hand: looks fine", run="gpt")


def saved_again(where: Path) -> None:
    """Step 2 a second time, from the beginning."""
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store

    with fixed.fixed_identity():
        fixed.save(Repo.open(open_store(where / "checkpoints")), "gpt", [2])


def removed(where: Path) -> None:
    from tenuto.maintenance import remove
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store

    repo = Repo.open(open_store(where / "checkpoints"))
    with fixed.fixed_identity():
        remove.execute(repo, remove.plan_remove(repo, [CheckpointId("gpt", 1, 2)]))


def marked_by_gc(where: Path) -> None:
    from tenuto.maintenance import gc
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store

    removed(where)
    repo = Repo.open(open_store(where / "checkpoints"))
    with fixed.fixed_identity():
        gc.execute(repo, gc.plan_gc(repo))


def trained(where: Path) -> None:
    """By a process of another machine, which still may be there."""
    from tenuto.model.ids import CheckpointId
    from tenuto.repo.ownership.claim import claim
    from tenuto.repo.repository import Repo
    from tenuto.store.registry import open_store

    with fixed.fixed_identity():
        claim(Repo.open(open_store(where / "checkpoints")), "small", CheckpointId("small", 1, 1), beat_s=3600.0)


def newer_format(where: Path) -> None:
    from tenuto.model import canonical_json

    path = where / "checkpoints/tenuto.json"
    values = json.loads(path.read_bytes())
    del values["digest"]
    path.write_bytes(canonical_json.seal({**values, "format": 2}))


def damaged_table(where: Path) -> None:
    table = where / "ranks/runs/main/a0001/step-00000002/boxes.index"
    table.write_bytes(table.read_bytes()[:-1] + b"?")


def there_already(where: Path) -> None:
    (where / "out.safetensors").write_bytes(b"mine")


def wrong_settings(where: Path) -> None:
    text = 'where = "checkpoints"\nin_flight = 0\n\n[save]\nstep = 500\n\n[keep]\nlatest = 3\nall = true\n'
    (where / "tenuto.toml").write_text(text)


def set_up(where: Path) -> None:
    text = 'where = "checkpoints"\nrun = "gpt"\n\n[save]\nsteps = 500\n\n[keep]\ndaily = 7\n'
    (where / "tenuto.toml").write_text(text)


CASES = (
    case("ls", "ls checkpoints", ways=EVERY),
    case("ls_colour", "ls checkpoints", damaged, ways="colour"),
    case("ls_damaged", "ls checkpoints --run gpt", damaged),
    case("ls_removed", "ls checkpoints --run gpt", removed),
    case("ls_trained", "ls checkpoints --run small", trained),
    case("ls_where", "ls checkpoints --where loss<0.3 --sort -loss --limit 3", ways=EVERY),
    case("ls_where_nothing", "ls checkpoints --where step>900"),
    case("ls_where_mistake", "ls checkpoints --where step>2GiB"),
    case("ls_where_unknown", "ls checkpoints --sort los"),
    case("ls_one_run", "ls checkpoints --run small"),
    case("ls_hostile_names", "ls hostile", ways=f"{EVERY} colour"),
    case("ls_empty", "ls new", ways="narrow pipes json"),
    case("ls_no_repository", "ls empty", ways="wide narrow pipes json"),
    case("ls_repository_nearby", "ls .", ways="narrow json"),
    case("ls_no_such_run", "ls checkpoints --run gtp", ways="narrow json"),
    case("ls_newer_format", "ls checkpoints", newer_format, ways="narrow json"),
    case("ls_bad_url", "ls nosuch://bucket/checkpoints", ways="narrow json"),
    case("log", "log checkpoints --run gpt", ways=EVERY),
    case("log_rolled_back", "log checkpoints --run gpt", rolled_back, ways=f"{EVERY} colour"),
    case("log_fork", "log checkpoints --run warm", rolled_back, ways="narrow"),
    case("log_page", "log checkpoints --run gpt -n 2", ways="narrow json"),
    case("log_damaged", "log checkpoints --run gpt", damaged, ways="narrow colour"),
    case("log_hostile_names", "log hostile", ways="narrow colour"),
    case("log_no_metric", "log checkpoints --run gpt --metric los", ways="narrow json"),
    case("log_empty", "log new", ways="narrow json"),
    case("compare", "compare checkpoints a0001/4 a0002/7 --run gpt", ways=EVERY),
    case("compare_runs", "compare checkpoints --metric loss:min", ways="narrow json"),
    case("compare_hostile_names", "compare hostile", ways="narrow"),
    case("compare_two_runs", "compare checkpoints 4 --run gpt --run small", ways="narrow json"),
    case("rollback", "rollback checkpoints 4 --run gpt --reason diverged", ways=EVERY),
    case("rollback_dry_run", "rollback checkpoints a0001/8 --run gpt --dry-run"),
    case("rollback_damaged", "rollback checkpoints gpt/a0001/6", damaged),
    case("rollback_other_run", "rollback checkpoints small/a0001/1 --run gpt", ways="narrow"),
    case("fork", "fork checkpoints baseline warm --reason lower"),
    case("fork_there_already", "fork checkpoints 4 small --run gpt"),
    case("bisect", "bisect checkpoints --run gpt --where loss<0.25", ways=EVERY),
    case("bisect_none", "bisect checkpoints --run gpt --where loss>3"),
    case("bisect_nan", "bisect checkpoints --run gpt --nan --leaf model/*", ways="narrow"),
    case("bisect_command", "bisect checkpoints --run gpt -- test {step} != gpt/a0002/7"),
    case("bisect_what", "bisect checkpoints --run gpt"),
    case("note", "note checkpoints 7 fine --run gpt --metric val_loss=0.25"),
    case("note_nothing", "note checkpoints 7 --run gpt"),
    case("pin", "pin checkpoints a0001/4 --run gpt --reason figure"),
    case("pin_hold", "pin checkpoints 7 --run gpt --hold"),
    case("pin_removed", "pin checkpoints a0001/4 --run gpt --remove", rolled_back),
    case("pin_not_there", "pin checkpoints 7 --run gpt --remove"),
    case("rm_pinned", "rm checkpoints gpt/a0001/4 --force --yes", rolled_back),
    case("ls_pinned", "ls checkpoints --run gpt", rolled_back),
    case("show_pinned", "show checkpoints --run gpt --step a0001/4", rolled_back, ways="narrow"),
    case("show_noted", "show checkpoints --run gpt --step a0002/7", rolled_back, ways="narrow"),
    case("show_step_of_two", "show checkpoints --run gpt --step 2", saved_again, ways="narrow"),
    case("show", "show checkpoints --run gpt", ways=EVERY),
    case("show_leaves", "show checkpoints --run gpt --leaves", ways="narrow"),
    case("show_depth", "show checkpoints --run gpt --depth 1", ways="narrow"),
    case("show_certificate", "show checkpoints --run gpt --certificate", ways="narrow"),
    case("show_private", "show ranks --private", ways="narrow"),
    case("show_timing", "show checkpoints --run gpt --timing", ways=EVERY),
    case("show_timing_damaged", "show checkpoints --run gpt --timing", damaged, ways="narrow colour json"),
    case("show_timing_one", "show checkpoints --run gpt --timing --step a0001/4"),
    case("show_timing_none", "show checkpoints --run small --timing"),
    case("show_timing_and_path", "show checkpoints model --run gpt --timing", ways="narrow json"),
    case("show_one_leaf", "show checkpoints --run small", ways="narrow"),
    case("show_hostile_names", "show hostile", ways=f"{EVERY} colour"),
    case("show_which_run", "show checkpoints", ways="narrow json"),
    case("show_no_such_step", "show checkpoints --run gpt --step 3", ways="narrow json"),
    case("show_no_step", "show checkpoints --run gpt --step three", ways="narrow json"),
    case("ls_ranks", "ls ranks", ways="narrow json"),
    case("show_ranks", "show ranks", ways=EVERY),
    case("show_ranks_leaf", "show ranks model/columns", ways="narrow json"),
    case("show_ranks_own", "show ranks #private/per_rank/seed --rank 2", ways="narrow"),
    case("show_ranks_whose", "show ranks #private/mine", ways="narrow json"),
    case("verify_ranks", "verify ranks", damaged_table, ways="narrow json"),
    case("export_ranks", "export ranks out.safetensors", damaged_table, ways="narrow"),
    case("diff", "diff checkpoints gpt/a0001/4 small/a0001/1", ways=EVERY),
    case("diff_same", "diff checkpoints gpt/a0001/4 gpt/a0001/6", ways="narrow json"),
    case("diff_ranks", "diff ranks latest latest", ways="narrow"),
    case("diff_no_such_entry", "diff checkpoints gpt/a0001/4 gpt/a0001/6 --entry modl", ways="narrow json"),
    case("verify", "verify checkpoints", ways=EVERY),
    case("verify_structure", "verify checkpoints --run gpt --structure", ways="narrow"),
    case("verify_damaged", "verify checkpoints --run gpt", damaged, ways=f"{EVERY} colour"),
    case("verify_empty", "verify new", ways="narrow json"),
    case("verify_part", "verify checkpoints --read 1%", ways="narrow json"),
    case("scrub", "scrub checkpoints --every 1s"),
    case("scrub_damaged", "scrub checkpoints --every 1s", damaged),
    case("repair_nothing", "repair checkpoints"),
    case("repair_damaged", "repair checkpoints --yes", damaged),
    case("repair_from", "repair checkpoints --from copy --yes", damaged_beside_a_copy, ways=EVERY),
    case("repair_dry_run", "repair checkpoints --from copy --dry-run", damaged_beside_a_copy, ways="narrow"),
    case("salvage", "repair checkpoints gpt/a0002/7 --salvage whole.safetensors", damaged),
    case("export", "export checkpoints out.safetensors --run gpt"),
    case("export_part", "export checkpoints w.safetensors --run gpt --include model --strip model/", ways="narrow"),
    case("export_damaged", "export checkpoints out.safetensors --run gpt --include *", damaged, ways=EVERY),
    case("export_all_damaged", "export checkpoints out.safetensors --run gpt", all_damaged, ways="wide narrow json"),
    case("export_there_already", "export checkpoints out.safetensors --run gpt", there_already, ways="narrow json"),
    case("export_other_kind", "export checkpoints out.ckpt --run gpt", ways="narrow"),
    case("export_nothing_chosen", "export checkpoints out.safetensors --run gpt --include modle", ways="narrow"),
    case("config_show", "config show", set_up, ways=f"{EVERY} colour"),
    case("config_check", "config check", set_up),
    case("config_check_wrong", "config check", wrong_settings, ways=EVERY),
    case("config_show_wrong", "config show", wrong_settings),
    case("ls_settings", "ls --run small", set_up),
    case("rm", "rm checkpoints gpt/a0001/2 gpt/a0001/8 --yes", ways="wide narrow pipes"),
    case("rm_json", "rm checkpoints gpt/a0001/2 --yes", ways="json"),
    case("rm_asks_yes", "rm checkpoints gpt/a0001/2", answer=b"y\n", ways="narrow colour"),
    case("rm_asks_no", "rm checkpoints gpt/a0001/2", answer=b"\n", ways="narrow"),
    case("rm_no_terminal", "rm checkpoints gpt/a0001/2", ways="pipes json"),
    case("rm_dry_run", "rm checkpoints gpt/a0001/2 gpt/a0002/7 --dry-run"),
    case("rm_refused", "rm checkpoints gpt/a0001/6 --yes", ways="wide narrow json"),
    case("undelete", "undelete checkpoints gpt/a0001/2", removed),
    case("undelete_dry_run", "undelete checkpoints 2 --run gpt --dry-run", removed, ways="narrow json"),
    case("undelete_not_removed", "undelete checkpoints gpt/a0001/4", removed, ways="narrow json"),
    case("undelete_nothing", "undelete checkpoints gpt/a0001/3", removed, ways="narrow"),
    case("cp", "cp checkpoints 5 7 --run gpt --to-run fork", ways=EVERY),
    case("cp_elsewhere", "cp checkpoints 7 --run gpt ./new-place --to-run fork --to-step 9", ways="narrow"),
    case("cp_dry_run", "cp checkpoints 7 --run gpt ./new-place --dry-run"),
    case("cp_nowhere", "cp checkpoints 7 --run gpt"),
    case("cp_over_itself", "cp checkpoints 7 --run gpt ./checkpoints"),
    case("mv", "mv checkpoints small tiny --yes", ways=EVERY),
    case("mv_dry_run", "mv checkpoints gpt baseline --dry-run"),
    case("mv_no_such_run", "mv checkpoints gtp baseline --yes"),
    case("drill_dry_run", "drill checkpoints --run gpt --target 60s --dry-run"),
    case("drill_no_location", "drill checkpoints --run gpt --from nowhere"),
    case("keep", "keep checkpoints --run gpt --latest 1 --best 1:loss --yes", ways=EVERY),
    case("keep_dry_run", "keep checkpoints --run gpt --every-steps 4 --dry-run"),
    case("keep_asks_no", "keep checkpoints --run gpt --latest 1", answer=b"\n", ways="narrow"),
    case("keep_calendar", "keep checkpoints --run gpt --hourly 24 --monthly 12 --yearly 10 --within 36h --dry-run"),
    case("keep_budget", "keep checkpoints --run gpt --latest 2 --after attempt --budget 1KiB --dry-run"),
    case("keep_what", "keep checkpoints --run gpt"),
    case("tag", "tag checkpoints good --run gpt --step 5"),
    case("tag_moves", "tag checkpoints baseline --run gpt"),
    case("tag_taken_off", "tag checkpoints baseline --delete"),
    case("tag_not_there", "tag checkpoints best --delete"),
    case("tag_no_name", "tag checkpoints 500 --run gpt"),
    case("show_leaf", "show checkpoints model/layers.0.weight --run gpt", ways=EVERY),
    case("show_plain", "show checkpoints config --run gpt"),
    case("show_no_such_path", "show checkpoints model/layers.7 --run gpt"),
    case("certify_no_command", "certify checkpoints"),
    case("certify_no_program", "certify checkpoints -- ./train-that-is-not-there"),
    case("bench_too_large", "bench checkpoints --size 900PiB", ways="narrow"),
    case("bench_no_size", "bench checkpoints --size much", ways="narrow json"),
    case("gc_nothing", "gc checkpoints"),
    case("gc_marks", "gc checkpoints", removed),
    case("gc_waits", "gc checkpoints --dry-run", marked_by_gc),
    case("gc_frees", "gc checkpoints --grace 0 --yes", marked_by_gc),
    case("gc_no_terminal", "gc checkpoints --grace 0", marked_by_gc, ways="pipes"),
    case("replicate_one_place", "replicate checkpoints", ways="narrow json"),
    case("replicate_elsewhere_plan", "replicate checkpoints ./copy --dry-run", ways="wide narrow json"),
    case("replicate_elsewhere", "replicate checkpoints ./copy", damaged, ways="narrow json"),
    case("replicate_check", "replicate checkpoints ./copy --check", copied_elsewhere, ways="pipes json"),
    case("replicate_no_place", "replicate checkpoints --follow", ways="narrow json"),
    case("promote_primary", "promote checkpoints --yes", ways="narrow json"),
    case("promote_refused", "promote copy --yes", copied_elsewhere, ways="pipes json"),
    case("promote", "promote copy --yes", primary_lost, ways="pipes json"),
    case("import", "import x.npz foreign --step 7", trained_by_another_tool, ways="pipes json"),
    case("import_plan", "import x.npz foreign --dry-run --dtype f16", trained_by_another_tool, ways="narrow json"),
    case("import_no_format", "import out/checkpoint-100/training_args.bin foreign", trained_by_another_tool),
    case("import_rule", "import x.npz foreign --rename v=u", trained_by_another_tool, ways="narrow"),
    case("migrate", "migrate out foreign --strip module.", trained_by_another_tool, ways="pipes json"),
    case(
        "migrate_plan",
        "migrate out foreign --dry-run --strip module.",
        trained_by_another_tool,
        ways="wide narrow json",
    ),
    case("migrate_damaged", "migrate out foreign", and_one_is_damaged, ways="pipes json"),
    case("migrate_damaged_plan", "migrate out foreign --dry-run", and_one_is_damaged, ways="narrow"),
    case("status", "status checkpoints --run gpt", copied_elsewhere, ways="pipes json"),
    case("status_runs", "status checkpoints", ways="wide narrow"),
    case("report", "report checkpoints --run gpt -o report.html", damaged),
    case("report_runs", "report checkpoints --run gpt --run small", ways="narrow"),
    case("report_not_mine", "report checkpoints -o out.safetensors", there_already, ways="narrow json"),
    case("version", "--version", ways="narrow"),
    case("help", "--help", ways="wide narrow colour"),
    case("no_command", "", ways="narrow pipes"),
    case("no_such_command", "lst checkpoints", ways="narrow json colour"),
    case("no_such_option", "ls checkpoints --rnu gpt", ways="wide narrow json"),
    case("no_place", "ls", ways="narrow json"),
    case("wrong_value", "gc checkpoints --grace soon", ways="narrow json"),
    *(case(f"help_{name}", f"{name} --help", ways="narrow") for name in COMMANDS),
)


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("data")
    fixed.make(where / "checkpoints")
    fixed.make_hostile(where / "hostile")
    fixed.make_ranks(where / "ranks")
    fixed.make_empty(where / "new")
    (where / "empty").mkdir()
    for name in COMMANDS:  # here once, and not in each child that is forked
        importlib.import_module(f"tenuto.cli.commands.{name}")
    for name in (
        "gc",
        "inspect",
        "remove",
        "replicate",
        "repair",
        "retention",
        "scrub",
        "status",
        "undelete",
        "verify",
    ):
        importlib.import_module(f"tenuto.maintenance.{name}")
    for name in (
        *("matplotlib.backends.backend_svg", "matplotlib.figure", "matplotlib.style", "typer._click.decorators"),
        *("tenuto.cli.console.reporting", "tenuto.cli.views.run_listing", "tenuto.cli.views.shards"),
        *("tenuto.cli.views.state_tree", "tenuto.history.query", "tenuto.history.timeline"),
        *("tenuto.report.facts", "tenuto.telemetry.progress"),
    ):
        importlib.import_module(name)
    return where


@pytest.fixture
def shown(places: Path, tmp_path: Path) -> Callable[[Case, str], Shown]:
    """Runs a case in one of the ways, each time in places of its own."""

    def run(one: Case, way: str) -> Shown:
        where = places
        if one.changes:
            where = tmp_path / way
            subprocess.run(["cp", "-a", places, where], check=True)  # a quarter of what copytree takes, 250 times
            one.prepare(where)

        def prepare() -> None:
            os.environ["XDG_STATE_HOME"] = str(tmp_path / f"{way}-state")
            fixed.show_fixed_places(where)

        match way:
            case "wide" | "narrow":
                columns = 120 if way == "wide" else 80
                found = on_terminal(
                    one.words, columns=columns, where=where, prepare=prepare, answer=one.answer, NO_COLOR="1"
                )
            case "colour":
                found = on_terminal(one.words, columns=120, where=where, prepare=prepare, answer=one.answer)
            case "pipes":
                found = on_pipes(one.words, where=where, prepare=prepare)
            case "json":
                found = on_pipes(one.typed(way), where=where, prepare=prepare)
            case _:
                raise AssertionError(way)
        return replace(found, stdout=settled(found.stdout, where), stderr=settled(found.stderr, where))

    return run


LOOKS = {
    "wide": "a terminal of 120 columns, NO_COLOR",
    "narrow": "a terminal of 80 columns, NO_COLOR",
    "colour": "a terminal of 120 columns, in colour",
    "pipes": "no terminal",
    "json": "no terminal, --json",
}


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_what_is_printed(one: Case, shown: Callable[[Case, str], Shown], pytestconfig: pytest.Config) -> None:
    text = "\n".join(section(one, way, shown(one, way)) for way in one.ways.split())
    path = HERE / f"{one.name}.txt"
    if pytestconfig.getoption("--update-snapshots"):
        path.write_text(text)
    assert path.exists(), f"no snapshot {path.name}: write it with --update-snapshots, and read it"
    assert text == path.read_text()


def test_no_snapshot_is_left_over() -> None:
    assert {path.stem for path in HERE.iterdir()} == {one.name for one in CASES}


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_manners(one: Case) -> None:
    """What holds for every output, read from the snapshots."""
    for way, lines, status in sections((HERE / f"{one.name}.txt").read_text()):
        errors = [line for line in lines if line.startswith(("! error:", "error:"))]
        hints = [place for place, line in enumerate(lines) if line.removeprefix("! ").startswith("hint:")]
        assert len(errors) <= 1
        assert not errors or status != 0
        assert not hints or hints == [len(lines) - 1], "a hint is the last line"
        if way == LOOKS["json"]:
            data = "\n".join(line for line in lines if not line.startswith("!"))
            assert re.fullmatch(r"tenuto\.[a-z_]+/1", json.loads(data)["schema"])
        if way == LOOKS["narrow"]:
            whole = [line.rpartition(r"\r\x1b[K")[2].replace("<duration>", "12.5 ms") for line in lines]
            wide = [line for line in whole if cells(line) > 80 and not line.startswith(COPIED)]
            assert not wide, "a line is broken in the middle on a terminal of 80 columns"
        if way != LOOKS["colour"]:
            # A name that holds an escape is shown spelled out; a line that tells how far it is erases itself.
            without_names = re.sub(r"\\x1b\[(31mred(\\x1b\[0m)?|K)", "", "".join(lines))
            assert "\\x1b[" not in without_names, "colour where none was asked for"


def settled(text: str, where: Path) -> str:
    text = text.replace(str(where), fixed.PLACE)
    for pattern, instead in RULES:
        text = pattern.sub(instead, text)
    return text


def section(one: Case, way: str, found: Shown) -> str:
    """One way of looking; lines of stderr are marked where the streams are apart; controls are spelled out."""
    words = " ".join(("tenuto", *one.typed(way)))
    lines = [f"{line}" for line in visible(found.stdout)] + [f"! {line}" for line in visible(found.stderr)]
    return "\n".join([f"$ {words}    # {LOOKS[way]}", *lines, f"[exit status {found.status}]", ""])


def visible(text: str) -> list[str]:
    spelled = "".join(char if char == "\n" or char >= " " else char.encode("unicode_escape").decode() for char in text)
    return spelled.removesuffix("\n").split("\n") if spelled else []


def sections(text: str) -> Iterator[tuple[str, list[str], int]]:
    lines: list[str] = []
    way = ""
    for line in text.splitlines():
        if line.startswith("$ tenuto"):
            way, lines = line.rpartition("    # ")[2], []
        elif line.startswith("[exit status "):
            yield way, lines, int(line.removeprefix("[exit status ").removesuffix("]"))
        else:
            lines.append(line)
