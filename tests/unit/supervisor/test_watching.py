"""What is done about findings: once an episode, by a table; and what a recording and a predictor get."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from support.traces import BEGAN
from tenuto.errors import UsageError
from tenuto.supervisor import watching
from tenuto.supervisor.actions import ACTIONS, CAUSES_OF, TABLE, written
from tenuto.supervisor.decide import CAUSES
from tenuto.supervisor.detectors.contract import FINDINGS, STEPS, Finding, Sample
from tenuto.supervisor.detectors.registry import detectors
from tenuto.supervisor.detectors.sampling import SamplingProcess
from tenuto.supervisor.journal import Journal
from tenuto.supervisor.risk.recording import read_recording
from tenuto.supervisor.strategies import TABLE as STRATEGIES_OF
from tenuto.supervisor.strategies import written as strategies_written
from tenuto.supervisor.watching import AGAIN_S, QUIET_S, SETTLE_S, Demand, Paces, Recorder, Watching
from tenuto.telemetry.heartbeat import ENDING, REQUEST_FILE, STARTING, TRAINING, Beat


class Found:
    """A detector that finds what it is given, of any sample."""

    source, period_s = "found", 1.0

    def __init__(self, *findings: Finding) -> None:
        self.findings = findings

    def sample(self) -> None:
        return None

    def judge(self, sample: Sample) -> tuple[Finding, ...]:
        return self.findings if sample.source == STEPS else ()


class Samples:
    """Stands for the sampling process."""

    def __init__(self, *samples: Sample) -> None:
        self.samples = list(samples)
        self.places: list[str] = []
        self.cpu_s = 0.25

    def take(self) -> list[Sample]:
        found, self.samples = self.samples, []
        return found

    def watch(self, places: list[str]) -> None:
        self.places = places

    def close(self) -> None:
        """Has nothing to end."""


class Told:
    def __init__(self, *findings: Finding, **more: Any) -> None:
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []
        journal = Journal(None, self.lines.append)
        journal.listen = lambda event, facts: self.events.append({"event": event, **facts})
        self.detector = Found(*findings)
        self.watching = Watching([self.detector], journal, self.lines.append, **more)
        self.now_s = 1000.0

    def observe(self, directory: Path, **beat: Any) -> Demand | None:
        """Five seconds later, with a training at work."""
        self.now_s += 5
        at = {"pid": 1, "rank": 0, "step": int(self.now_s), "phase": TRAINING, "at_s": self.now_s}
        return self.watching.observe(directory, [Beat(**{**at, **beat})], self.now_s)


def test_the_tables_are_whole_and_no_finding_has_the_name_of_a_cause() -> None:
    assert set(TABLE) == set(FINDINGS) and set(TABLE.values()) == set(ACTIONS)
    assert set(CAUSES_OF.values()) <= set(CAUSES)
    assert not {name.replace("-", " ") for name in FINDINGS} & set(STRATEGIES_OF)


def test_actions_are_written_over_the_table_and_causes_are_left_for_theirs() -> None:
    table, rest = written(["straggler=restart", "hung=stop:3", " memory = warn "])
    assert (table["straggler"], table["memory"], table["preemption"]) == ("restart", "warn", "leave")
    assert rest == ["hung=stop:3"] and strategies_written(rest).table["hung"] == "stop"
    with pytest.raises(UsageError, match="there is no 'sav', but note, warn, save, leave, restart") as failed:
        written(["memory=sav"])
    assert "save" in (failed.value.hint or "")


def test_an_unknown_name_is_answered_with_causes_and_findings() -> None:
    _, rest = written(["stragler=warn"])
    with pytest.raises(UsageError) as failed:
        strategies_written(rest)
    assert "straggler" in f"{failed.value} {failed.value.hint}"


def test_a_risk_that_lasts_is_said_once_and_asks_again_only_of_training_that_makes_steps(tmp_path: Path) -> None:
    told, calls = Told(), []

    class Always:
        def observe(self, samples: Any, now: float) -> Finding:
            calls.append(now)
            return Finding("risk", f"0.{len(calls):02d} within the hour")

    told.watching.predictor = Always()

    def asked(step: int) -> bool:
        (tmp_path / REQUEST_FILE).unlink(missing_ok=True)
        told.observe(tmp_path, step=step)
        return (tmp_path / REQUEST_FILE).exists()

    assert [asked(step) for step in (5, 5, 5, 6, 6, 7)] == [True, False, False, True, False, True]
    assert told.lines == ["risk: 0.01 within the hour: the training is asked for a save"]


def test_a_warning_is_said_once_an_episode(tmp_path: Path) -> None:
    told = Told(Finding("disk-filling", "/ckpts has 1 GiB free", "/ckpts"))
    for _ in range(100):
        assert told.observe(tmp_path) is None
    assert told.lines == ["disk-filling: /ckpts has 1 GiB free"]
    told.detector.findings = ()
    for _ in range(int(QUIET_S / 5) + 1):
        told.observe(tmp_path)
    told.detector.findings = (Finding("disk-filling", "/ckpts has 2 GiB free", "/ckpts"),)
    told.observe(tmp_path)
    assert told.lines[1:] == ["disk-filling: /ckpts has 2 GiB free"]
    assert [(one["event"], one["action"], one["severity"]) for one in told.events] == [
        ("finding", "warn", "severe")
    ] * 2


def test_a_note_stands_in_the_journal_alone(tmp_path: Path) -> None:
    told = Told(Finding("clock", "the clock was set"))
    told.observe(tmp_path)
    assert told.lines == [] and told.events == [
        {"event": "finding", "finding": "clock", "subject": "", "evidence": "the clock was set", "action": "note",
         "severity": "routine"},
    ]  # fmt: skip


def test_a_save_is_asked_for_as_long_as_it_holds_but_not_all_the_time(tmp_path: Path) -> None:
    told = Told(Finding("memory", "1 GiB left"))
    asked = 0
    for _ in range(int(AGAIN_S / 5) * 3):
        told.observe(tmp_path)
        if (tmp_path / REQUEST_FILE).exists():
            assert (tmp_path / REQUEST_FILE).read_text() == "memory: 1 GiB left"
            (tmp_path / REQUEST_FILE).unlink()
            asked += 1
    assert asked == 3 and len(told.lines) == 3


def test_what_the_supervisor_has_to_do_is_returned_and_to_leave_comes_first(tmp_path: Path) -> None:
    lost, notice = Finding("gpu-lost", "GPU 3 is lost", "GPU 3"), Finding("preemption", "AWS takes it", "aws", 90.0)
    told = Told(lost, notice)
    assert told.observe(tmp_path) == Demand("leave", notice)
    assert told.observe(tmp_path) is None, "once"
    assert Told(lost).observe(tmp_path) == Demand("restart", lost)
    assert Told(lost, actions={**TABLE, "gpu-lost": "note"}).observe(tmp_path) is None


@pytest.mark.parametrize(
    ("beat", "grace_s", "at_once"),
    [
        ({"saves": 1, "save_s": 40.0, "sealed": 1}, 30.0, True),
        ({"saves": 1, "save_s": 40.0, "sealed": 1}, 120.0, False),
        ({"saves": 1, "save_s": 40.0, "sealed": 16}, 30.0, False),  # of a job on more nodes than this one
        ({"saves": 1, "save_s": 40.0, "sealed": 0}, 30.0, False),
        ({"saves": 0, "save_s": 0.0, "sealed": 1}, 30.0, False),
        ({"saves": 1, "save_s": 40.0, "sealed": 1}, None, False),
    ],
)
def test_where_the_time_does_not_suffice_for_a_save_it_ends_at_once_if_memory_holds_a_state(
    tmp_path: Path, beat: dict[str, Any], grace_s: float | None, at_once: bool
) -> None:
    told = Told()
    told.observe(tmp_path, **beat)
    told.detector.findings = (Finding("preemption", "soon", "aws", grace_s),)
    demand = told.observe(tmp_path, **beat)
    assert demand is not None and demand.at_once == at_once
    assert demand.grace_s == (None if grace_s is None else grace_s - 2)


def test_a_predictor_gets_every_sample_each_time_and_its_finding_is_acted_upon(tmp_path: Path) -> None:
    calls: list[list[str]] = []

    class Foresees:
        def observe(self, samples: Iterable[Sample], now: float) -> Finding | None:
            calls.append([sample.source for sample in samples])
            return Finding("risk", "0.93 within the hour") if len(calls) == 3 else None

    gpu = Sample(BEGAN, "gpu", {"0.temperature": 60})
    told = Told(predictor=Foresees(), sampling=Samples(gpu))
    for _ in range(3):
        told.observe(tmp_path)
    told.watching.observe(tmp_path, [], told.now_s + 1)
    told.watching.ended("killed")
    assert calls == [["gpu", STEPS], [STEPS], [STEPS], [], ["end"]]
    assert told.lines == ["risk: 0.93 within the hour: the training is asked for a save"]
    assert (tmp_path / REQUEST_FILE).read_text() == "risk: 0.93 within the hour"


def test_samples_are_recorded_with_the_ends_of_starts(tmp_path: Path) -> None:
    memory = Sample(BEGAN, "memory", {"host_available_bytes": 123.0})
    told = Told(sampling=Samples(memory))
    told.watching.recorder = Recorder(tmp_path / "deep" / "samples.jsonl", told.lines.append)
    told.observe(tmp_path)
    told.watching.ended("killed")
    lines = (tmp_path / "deep" / "samples.jsonl").read_text().splitlines()
    assert lines[0] == f'{{"at": {BEGAN}, "source": "memory", "values": {{"host_available_bytes": 123.0}}}}'
    found = [Sample.read(line) for line in lines]
    assert [(one.source, one.kind) for one in found] == [("memory", None), (STEPS, None), ("end", "killed")]
    assert told.watching.close() == 0.25


def test_a_recording_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    recorder = Recorder(Path("/dev/full"), lines.append)
    for _ in range(3):
        recorder.write([Sample(BEGAN, "memory", {})])
    assert len(lines) == 1 and "samples are not recorded any more" in lines[0]


def test_the_places_of_the_run_that_have_a_directory_are_sampled(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("/a\nmain\n/a\ns3://bucket/b\nfile:///c")
    samples = Samples()
    Told(sampling=samples).observe(tmp_path)
    assert samples.places == ["/a", "/c"]


def test_the_paces_of_ranks_come_from_two_beats_of_the_same_process_that_trains() -> None:
    def beat(rank: int, step: int, at_s: float, **more: Any) -> Beat:
        return Beat(**{"pid": rank, "rank": rank, "step": step, "phase": TRAINING, "at_s": at_s, **more})

    paces = Paces()
    first = paces.sample({0: beat(0, 10, 1.0), 1: beat(1, 9, 1.0), 2: beat(2, 9, 1.0, phase=STARTING)}, 2.0)
    assert first is not None and first.values == {"ranks": 3, "step": 9, "saves": 0}
    assert paces.sample({0: beat(0, 12, 4.0)}, 4.0) is None, "not due yet"
    saved = {"saves": 2, "save_s": 3.0, "save_bytes": 100, "sealed": 3}
    beats = {0: beat(0, 14, 6.0, **saved), 1: beat(1, 11, 6.0, **saved), 2: beat(2, 11, 6.0, **saved)}
    second = paces.sample(beats, 7.0)
    assert second is not None and second.values == {
        "ranks": 3, "step": 11, "saves": 2, "save_s": 3.0, "save_bytes": 300,
        "0.step_s": 1.25, "1.step_s": 2.5, "step_s": 2.5,
    }  # fmt: skip
    assert paces.sealed and paces.to_save_s == 5.5
    third = paces.sample({0: beat(0, 20, 9.0, pid=99), 1: beat(1, 12, 9.0, phase=ENDING)}, 12.0)
    assert third is not None and "step_s" not in third.values
    assert paces.sample({}, 99.0) is None


def test_the_sampling_process_samples_this_machine_and_says_what_it_took(tmp_path: Path) -> None:
    lines: list[str] = []
    process = SamplingProcess("off", lines.append)
    process.watch([str(tmp_path)])
    found: dict[str, Sample] = {}
    while not {"memory", "clock", "disk"} <= found.keys():
        found |= {sample.source: sample for sample in process.take()}
    assert found["disk"].by_thing()[str(tmp_path)]["free_bytes"] > 0
    process.close()
    process.close()
    assert process.cpu_s > 0 and process.take() == [] and lines == []


def test_a_sampling_process_that_ends_is_said_once(tmp_path: Path) -> None:
    lines: list[str] = []
    process = SamplingProcess("off", lines.append)
    os.kill(process._process.pid, 9)
    while not lines:
        process.take()
    process.watch([str(tmp_path)])
    assert process.take() == [] and len(lines) == 1
    process.close()


def test_a_detector_that_fails_is_said_and_the_others_go_on() -> None:
    """In the process itself, whose end is that of its requests."""
    import io

    from tenuto.supervisor.detectors.sampling import Sampling

    class Fails(Found):
        source = "fails"

        def sample(self) -> None:
            raise ValueError("odd counter")

    read, write = os.pipe()
    Sampling([Fails(), *detectors("off")], write).run(io.StringIO(""))
    with open(read) as pipe:
        while "fails" not in (line := pipe.readline()):
            assert line
    assert Sample.read(line).kind == "ValueError: odd counter"


def test_watching_needs_no_sampling(tmp_path: Path) -> None:
    assert watching.Watching(detectors("off"), Journal(None, print), print).observe(tmp_path, [], 0.0) is None


def test_what_the_sampling_process_prints_besides_samples_ends_no_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('welcome')\nprint('to this node', flush=True)\n")
    monkeypatch.syspath_prepend(tmp_path)
    lines: list[str] = []
    process = SamplingProcess("off", lines.append)
    found: set[str] = set()
    while "clock" not in found:
        found |= {sample.source for sample in process.take()}
    process.close()
    assert lines == ["the process that samples the machine prints something that is not a sample: b'welcome'"]


def test_a_recording_goes_on_behind_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path, samples = tmp_path / "samples.jsonl", [Sample(BEGAN + number, "memory", {"a": 1.0}) for number in range(3)]
    for cut in (9, -3, -1):
        path.write_text(f"{samples[0].line()}\n{samples[1].line()[:cut]}")
        recorder = Recorder(path, print)
        recorder.write(samples[2:])
        assert read_recording(path) == [samples[0], samples[2]]
    path.write_text(f"{samples[0].line()}\nnone\n")
    with pytest.raises(UsageError, match="line 2"):
        read_recording(path)


def test_what_is_read_right_after_a_restart_does_not_end_the_next_start(tmp_path: Path) -> None:
    """An Xid that has ended the training is read after its end."""
    told = Told(Finding("gpu-xid", "GPU 0 reports Xid 94", "GPU 0"))
    told.watching.ended("failed")
    assert told.observe(tmp_path) is None
    assert told.lines == ["gpu-xid: GPU 0 reports Xid 94"] and told.events[0]["action"] == "warn"
    told.detector.findings = (Finding("gpu-lost", "GPU 1 is lost", "GPU 1"),)
    told.now_s += SETTLE_S
    demand = told.observe(tmp_path)
    assert demand is not None and demand.action == "restart"


def test_of_one_that_was_asked_to_leave_nothing_more_is_asked_and_no_more_is_said(tmp_path: Path) -> None:
    told = Told(
        Finding("gpu-lost", "GPU 1 is lost"), Finding("preemption", "soon", "aws", 60.0), Finding("memory", "-")
    )
    beat = Beat(pid=1, rank=0, step=1, phase=TRAINING, at_s=1000.0)
    assert told.watching.observe(tmp_path, [beat], 1000.0, leaving=True) is None
    assert told.lines == ["gpu-lost: GPU 1 is lost", "preemption: soon", "memory: -"]
    assert [one["action"] for one in told.events] == ["warn"] * 3 and not (tmp_path / REQUEST_FILE).exists()
