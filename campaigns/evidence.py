"""docs/evidence.md: what the campaigns found, made from their committed results and nothing else.

    python -m campaigns.evidence            # writes docs/evidence.md
    python -m campaigns.evidence --check    # fails where the page says something else

A campaign whose result is not there is left out.
"""

# ruff: noqa: E501  (sentences of the page)

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
PAGE: Final = ROOT / "docs" / "evidence.md"
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Campaign:
    """One campaign. `attack`: what it does; `found`: what its result says, in one sentence or two."""

    result: str
    title: str
    attack: str
    found: Callable[[Result], str]


def _bugs(result: Result) -> str:
    caught = result.get("bugs_caught", result.get("bugs_seen"))
    return f"{caught} of {result['bugs_seeded']} bugs seeded one at a time were caught."


def _bold(count: int, thing: str) -> str:
    return f"**{count:,}** {thing}"


def _crash_states(result: Result) -> str:
    states = _bold(result["distinct_states"], "distinct states of the disk")
    return f"{states}, {len(result['violations'])} broken rules. {_bugs(result)}"


def _kills(result: Result) -> str:
    return (
        f"{_bold(result['kills'], 'kills')}, {result['kills_while_saving']} of them during a save and "
        f"{result['kills_while_starting']} while starting; every run ended bitwise equal: "
        f"{'yes' if result['equal'] else '**no**'}."
    )


def _kills_memory(result: Result) -> str:
    lost = result["steps_lost"]
    after = sum(lost["after_the_first_sealed_state"].values())
    return (
        f"{_bold(result['kills'], 'kills')}; {result['restarts_from_memory']} restarts from memory and "
        f"{result['restarts_from_store']} from the disk, {result['restarts_equal']} bitwise equal to their step and "
        f"{result['restarts_different']} not. Of {after} kills after the first sealed state {lost['at_most_one_after_it']} lost "
        f"at most one step; in {lost['more_than_one_while_writing_to_the_store']} of the other {lost['more_than_one_after_it']} one "
        "image was being written to the store while the other one was struck."
    )


def _kills_supervised(result: Result) -> str:
    return (
        f"{_bold(result['kills'], 'kills')}: {result['kills_of_the_training']:,} of the training, "
        f"{result['kills_of_the_supervisor']} of the supervisor and {result['kills_of_both_at_once']} of both at once; "
        f"{result['kills_while_starting']} before a first step. {result['restarts_by_a_supervisor']:,} restarts by a supervisor; every "
        f"round ended by itself, with no process left, bitwise equal: {'yes' if result['equal'] else '**no**'}."
    )


def _trainer_kills(result: Result) -> str:
    trainers = [f"{one['trainer']} {one['kills']}" for one in result["by_trainer"]]
    return (
        f"{_bold(result['kills'], 'kills')} ({', '.join(trainers)}); {result['equal']} of {result['rounds']} trainings ended "
        f"bitwise equal to one that nobody killed, with the trainer's own counters, histories and callbacks. {result.get('note', '')}"
    ).rstrip()


def _corruption(result: Result) -> str:
    peers = result["peers_flipped_bit_in_tensor_bytes"]
    others = (
        ""
        if not peers
        else " `torch.load`, `dcp.load` and safetensors returned other values for flipped bits without an error."
    )
    return (
        f"{_bold(result['faults'], 'faults')}: {result['detected']:,} detected, {result['violation_count']} broken rules, "
        f"{result['false_alarm_count']} false alarms. {_bugs(result)}{others} {result.get('note', '')}".rstrip()
    )


def _repairs(result: Result) -> str:
    return (
        f"{_bold(result['cases'], 'cases')}, {result['struck']:,} objects damaged: {result['repaired']:,} whole again, "
        f"{result['quarantined']:,} checkpoints that nothing could repair noted as damaged, {result['violation_count']} false "
        "claims or changes of what was healthy."
    )


def _faults(result: Result) -> str:
    struck = f"at {result['call_sites_struck']} of {result['call_sites']} call sites"
    bugs = f" {_bugs(result)}" if result["bugs_seeded"] else ""
    return f"{_bold(result['cases'], 'cases')} {struck}, {len(result['violations'])} broken rules.{bugs}"


def _rank_kills(result: Result) -> str:
    controls = (
        f" {result['controls_told']} of {result['controls']} controls that must differ were told apart."
        if result["controls"]
        else ""
    )
    return (
        f"{_bold(result['kills'], 'kills')}; {result['rounds_equal_to_the_untouched_training']} of {result['rounds']} trainings "
        f"ended bitwise equal to one that nobody touched.{controls}"
    )


def _phases(result: Result) -> str:
    return (
        f"{_bold(result['cells'], 'cells')} (who is lost, how, in which of {len(result['by_phase'])} phases); in "
        f"{result['cells_without_a_fault']} the others raised within their bound, named who or what, and the job resumed. Of "
        f"{result['old_jobs_that_came_back']} old jobs that came back {result['old_jobs_that_changed_nothing']} changed nothing."
    )


def _fuzz(result: Result) -> str:
    return f"{_bold(result['executions'], 'inputs')} over {len(result['targets'])} readers of bytes, {result['crashes']} crashes."


def _retention(result: Result) -> str:
    return (
        f"{_bold(result['histories'], 'histories')}, {result['checkpoints_judged']:,} checkpoints judged, "
        f"{len(result['violations'])} removed that had to stay. {_bugs(result)}"
    )


def _exact(result: Result) -> str:
    return (
        f"{_bold(result['cases'], 'trainings')}, resumed {result['resumes']} times in new processes: {result['equal']} equal to the "
        f"uninterrupted one, bit for bit. {result['controls_told']} of {result['controls']} controls that must differ were told apart."
    )


def _exact_ranks(result: Result) -> str:
    return (
        f"{_bold(result['cases'], 'jobs')}: {result['as_they_have_to_be']} as they have to be, "
        f"{result['on_as_many_ranks_bit_for_bit']} of them on as many ranks, bit for bit; "
        f"{result['tensors_equal_after_a_restore']:,} restored tensors compared. {result['controls_told']} of {result['controls']} "
        "controls that must differ were told apart."
    )


def _layouts(result: Result) -> str:
    parts = (result["over_processes"], result["over_simulated_ranks"])
    restores, faults = sum(part["restores_of_one_rank"] for part in parts), sum(len(part["faults"]) for part in parts)
    return f"{_bold(result['pairs'], 'pairs of layouts')}, {restores:,} restores of a rank, {faults} wrong. {_bugs(result)}"


def _stateful(result: Result) -> str:
    histories = _bold(result["histories"], "histories")
    return f"{histories} of {result['steps']:,} steps, {len(result['findings'])} disagreements with the model. {_bugs(result)}"


def _signals(result: Result) -> str:
    return f"{_bold(result['cases'], 'cases')}, {len(result['faults'])} faults. {_bugs(result)}"


def _many_ranks(result: Result) -> str:
    largest = max(size["ranks"] for size in result["sizes"])
    return f"**{len(result['sizes'])}** jobs of up to {largest:,} ranks, each planned, saved, committed and restored by the code that each rank runs."


def _mutation(result: Result) -> str:
    changes = f"Of **{result['run']}** changes the tests noticed {result['killed']}"
    return changes + (f"; with the tests written since, {result['again']['killed']}." if "again" in result else ".")


CAMPAIGNS: Final = (
    Campaign(
        "r1_crash_states",
        "Power loss",
        "A recorder takes down every file-system call of saves, removals and tags. From each prefix of the calls a generator makes the "
        "states that a power loss could leave, with writes and names that were not flushed lost or torn in any order. In each state, "
        "every committed checkpoint has to be there and nothing torn may be accepted.",
        _crash_states,
    ),
    Campaign(
        "r1_ranks",
        "Power loss, several ranks",
        "The same for saves by two and three ranks, on one machine, on nodes "
        "that lose their own writes, in one location and with copies.",
        _crash_states,
    ),
    Campaign(
        "r2_kills",
        "`kill -9`",
        "A real training is killed at random moments, restarted, and compared bit for bit with one that nobody killed.",
        _kills,
    ),
    Campaign(
        "r2_kills_memory",
        "`kill -9`, every step in memory",
        "The same with every step kept in shared memory, and kills inside capture, seal, adoption, flush and writing.",
        _kills_memory,
    ),
    Campaign(
        "r2_kills_encoded",
        "`kill -9`, encoded",
        'The same as the first, with `encoding="small"`, `"dedupe"` and `"auto"` in turn: saves rest on what earlier ones have written.',
        _kills,
    ),
    Campaign(
        "r2_kills_memory_encoded",
        "`kill -9`, encoded, every step in memory",
        'With memory, and `encoding="small"` and `"dedupe"` in turn.',
        _kills_memory,
    ),
    Campaign(
        "r2_supervised",
        "`kill -9`, under the supervisor",
        "Trainings under `tenuto run` are killed at random moments, and so is `tenuto run`, which is then started again while the training "
        "that it leaves behind still saves. Nobody else starts a training.",
        _kills_supervised,
    ),
    Campaign(
        "trainer_kills",
        "`kill -9`, in trainers",
        "Trainings with each trainer's adapter are killed at random moments and started again by the same line; `make test-trainers` "
        "kills each of them once or twice.",
        _trainer_kills,
    ),
    Campaign(
        "signals",
        "Signals",
        "SIGTERM, SIGINT and handlers that raise, delivered at drawn lines of Tenuto's own code, in trainings "
        "of every kind.",
        _signals,
    ),
    Campaign(
        "r3_corruption",
        "Damage",
        "Flipped bits, bytes and sectors, cut and missing files, one object under another's name, "
        "directories of other repositories: over every class of byte of every kind of object.",
        _corruption,
    ),
    Campaign(
        "repair",
        "Repairs",
        "Repositories with copies, mirrors, tiers, nodes, ranks, neighbours, encodings, keys and images in memory, "
        "damaged in one place or several, and repaired.",
        _repairs,
    ),
    Campaign(
        "r4_faults",
        "Failing disks",
        "Disks that return errors, fill up, hang or lose what was not flushed, at every kind of call; "
        "and file systems that are really full.",
        _faults,
    ),
    Campaign(
        "r4_faults_on",
        "Failing disks, the run before",
        "More cases, before the run above. All four broken rules are one fault: the flush of a note failed, the next note was written, and "
        "a power loss left a gap in their numbers. It is mended, with a test, and the four cases pass.",
        _faults,
    ),
    Campaign(
        "r5_ranks",
        "Killed ranks",
        "Single ranks of jobs under torchrun are killed, the first one among them, in every phase.",
        _rank_kills,
    ),
    Campaign(
        "r5_nodes",
        "Killed ranks, a disk for each node",
        "The same with data files on the nodes' own disks, and ranks that change nodes and number between restarts.",
        _rank_kills,
    ),
    Campaign(
        "r5_phases",
        "Lost ranks, coordinators and stores",
        "A rank, the coordinator, the launcher, the server they meet at or the "
        "shared directory is killed, stopped, removed or hung in each phase.",
        _phases,
    ),
    Campaign(
        "r6_fuzz", "Hostile files", "Every reader of bytes is fuzzed behind its checksums, in bounded memory.", _fuzz
    ),
    Campaign(
        "r7_retention",
        "Retention",
        "Random histories with rollbacks, forks, copies, damage and clocks that are wrong.",
        _retention,
    ),
    Campaign(
        "r8_exact_resume",
        "Exact resume",
        "Trainings with many loaders, optimizers, schedulers and generators are stopped and resumed in new processes.",
        _exact,
    ),
    Campaign(
        "r8_ranks",
        "Exact resume, several ranks",
        "Jobs of one to four ranks (DDP, FSDP2) are stopped, killed and resumed on as many ranks and on others.",
        _exact_ranks,
    ),
    Campaign(
        "layouts",
        "Other layouts",
        "Random pairs of layouts (DDP, FSDP2, HSDP, tensor parallelism, pipelines, experts, declared "
        "boxes) are saved as one, restored as the other, and back.",
        _layouts,
    ),
    Campaign(
        "r_stateful",
        "Random histories",
        "Random sequences of saves, crashes, copies, damage, forks and removals, compared with "
        "a small model of what must be true.",
        _stateful,
    ),
    Campaign(
        "r_stateful_ranks", "Random histories, several ranks", "The same for jobs of one to four ranks.", _stateful
    ),
    Campaign(
        "many_ranks", "Thousands of ranks", "Jobs of many ranks and up to a million shards in one process.", _many_ranks
    ),
    Campaign("mutation", "Mutants", "Small random changes to `repo`, `store` and staging, one at a time.", _mutation),
)


def page() -> str:
    lines = [
        "# Evidence",
        "",
        "What attacks Tenuto, and what each attack found. Made by `python -m campaigns.evidence` from the files in",
        "[`benchmarks/results`](../benchmarks/results); do not edit it by hand. Each file names its command, seed, commit, versions and machine.",
        "`make test` runs a short slice of each campaign, and the `Makefile` has a target for each whole one. A *seeded bug* is a deliberate",
        "defect in Tenuto's own protocol: a campaign that does not find it proves nothing.",
    ]
    for campaign in CAMPAIGNS:
        path = RESULTS / f"{campaign.result}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        lines += ["", f"## {campaign.title}", "", campaign.attack, "", campaign.found(result)]
        lines += ["", f"<small>{_origin(result)} · [`{path.name}`](../benchmarks/results/{path.name})</small>"]
    return "\n".join(lines) + "\n"


def _origin(result: Result) -> str:
    commit = f"commit `{result['commit']}`" if result.get("commit") else "commit not recorded"
    return f"{commit} · {result['seconds'] / 60:.0f} min"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page differs")
    options = parser.parse_args()
    made = page()
    if options.check:
        there = PAGE.exists() and PAGE.read_text(encoding="utf-8") == made
        sys.exit(None if there else "docs/evidence.md differs from the results: python -m campaigns.evidence")
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
