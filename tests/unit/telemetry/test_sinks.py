import dataclasses
import io
import json
import logging
import math
import threading
import warnings

import pytest

from tenuto import events
from tenuto.model.ids import CheckpointId
from tenuto.model.timing import RankTimings, Timing
from tenuto.telemetry import JsonLines, LogSink, ProgressBar
from tenuto.telemetry.jsonlines import SCHEMA
from tenuto.telemetry.log import sentence

ID = CheckpointId("gpt", 7, 500)
EVENTS = [
    events.AttemptClaimed("gpt", 7, CheckpointId("gpt", 6, 300)),
    events.AttemptClaimed("gpt", 1, None),
    events.SaveStarted(ID, "ab" * 16, 3 << 30, 1, "step 500 (every 100 steps)"),
    events.Captured(ID, 0.125, "shared memory"),
    events.Progress("save", str(ID), 1, 2),
    events.PackWritten(ID, "rank-00000.safetensors", 3 << 30, 1.5),
    events.Committed(ID, 3 << 30, 1.75, Timing(write_s=1.5, bytes=3 << 30)),
    events.SaveFailedEvent(ID, "no space left", "writing the index", "free space"),
    events.SaveSkipped("gpt", 510, "the last save is still being written"),
    events.CandidateSkipped(ID, "rank-00000.safetensors is 3 bytes short"),
    events.RestoredEvent(ID, 3 << 30, 0.5),
    events.Removed(ID, "not among the newest 3"),
    events.LeafDemoted("model/embed.weight", "it was changed in place"),
    events.Warned("shared memory does not fit", "/dev/shm"),
    events.RanksBehind("gpt", "put 3", (1, 4), 2.0, "ranks 1 and 4", "rank 1 (last reported 'writing', 3.0 s ago)"),
    events.SavedToMemory(ID, 3 << 30, 0.12, 0.25),
    events.RestoredFromMemory(ID, 4.0, ID),
    events.SaveDelayed("gpt", 520, 0.25),
    events.Resumed(ID, "ckpts", 3 << 30, 0.5, verdict="no known gap", run="gpt"),
    events.Resumed(ID, "ckpts", 3 << 30, 0.5, run="warm"),
    events.Resumed(ID, "ckpts", 3 << 30, 0.5, 4.0, CheckpointId("gpt", 6, 300)),
    events.PassedOver("ckpts", ((ID, "w is cut"), (ID, "gone")), CheckpointId("gpt", 6, 300)),
    events.WaitingForOwner("gpt", "process 5 of me on here", 5, "here", "it is leaving", 58.0),
    events.NothingToDo("gpt", 120, 100, "step"),
    events.SignalReceived("gpt", "SIGTERM", 500, True),
    events.SignalReceived("gpt", "SIGINT", 500, False),
    events.Leaving("gpt", "SIGTERM", 500, ID, "ckpts", 143),
    events.Leaving("gpt", "SIGINT", 502, ID, "ckpts", None),
    events.Leaving("gpt", "SIGTERM", 3, None, "ckpts", 143),
    events.TierLag("gpt", "s3://bucket/run", ID, 2, 6 << 30, "no answer"),
    events.TierSkipped(ID, "s3://bucket/run", "step 600 is due there by now"),
]


def drawing():
    """The threads that draw; one that was told to end is joined first."""
    threads = [thread for thread in threading.enumerate() if type(thread).__name__ == "_RefreshThread"]
    for thread in threads:
        if thread.done.is_set():
            thread.join(10)
    return [thread for thread in threads if thread.is_alive()]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_story_is_one_line_for_what_a_person_wants_to_know():
    assert [sentence(event) for event in EVENTS] == [
        "claimed run gpt as attempt 7, after gpt/a0006/300",
        "claimed run gpt as attempt 1, from nothing",
        "saving step 500 of run gpt: 3.00 GiB in 1 leaf (step 500 (every 100 steps))",
        "copied step 500 of run gpt: training was blocked for 0.12 s",
        None,
        None,
        "saved step 500 of run gpt (3.00 GiB in 1.75 s)",
        "the save of gpt/a0007/500 failed while writing the index: no space left; free space",
        "skipped the save of step 510 of run gpt: the last save is still being written",
        "step 500 of run gpt is damaged and was passed over: rank-00000.safetensors is 3 bytes short",
        "restored step 500 of run gpt (3.00 GiB in 0.50 s, verified)",
        "removed step 500 of run gpt: not among the newest 3",
        "model/embed.weight is captured eagerly from now on: it was changed in place",
        "shared memory does not fit",
        "run gpt has waited 2.00 s in put 3 for rank 1 (last reported 'writing', 3.0 s ago)",
        "sealed step 500 of run gpt in memory (3.00 GiB in 0.25 s)",
        "restored step 500 of run gpt from memory, sealed 4.00 s ago",
        "the save of step 520 of run gpt blocked training for 0.25 s, until the one before was written",
        "resumed run gpt at step 500 from ckpts (3.00 GiB in 0.50 s, verified; no known gap)",
        "run warm begins with step 500 of run gpt, from ckpts (3.00 GiB in 0.50 s, verified)",
        "resumed run gpt at step 500 from memory, sealed 4.00 s ago (3.00 GiB in 0.50 s, verified); "
        "the newest checkpoint in ckpts is step 300",
        "step 500 of run gpt is damaged and was passed over, as were 1 more, for step 300 (w is cut); "
        "run `tenuto verify ckpts --run gpt`",
        "waiting up to 58.0 s for process 5 of me on here, which owns run gpt: it is leaving",
        "run gpt is at step 120, so steps(100) has nothing left to do; ask for more, or begin another run with run=...",
        "SIGTERM: finishing step 501, then saving run gpt and leaving",
        "SIGINT: step 500 is done; saving run gpt and leaving; Ctrl-C again stops at once",
        "SIGTERM: leaving with status 143; step 500 of run gpt is saved in ckpts",
        "SIGINT: leaving as an earlier handler of the signal says; step 500 of run gpt is saved in ckpts, "
        "2 steps behind",
        "SIGTERM: leaving with status 143; nothing of run gpt is saved in ckpts",
        "run gpt: s3://bucket/run is 2 checkpoints (6.00 GiB) behind: no answer",
        "s3://bucket/run does not get step 500 of run gpt: step 600 is due there by now",
    ]


def test_every_kind_of_event_has_an_example_here():
    kinds = {kind.__name__ for kind in events.Event.__subclasses__()}
    assert {type(event).__name__ for event in EVENTS} == kinds


def test_json_lines_holds_every_event_with_all_its_fields(tmp_path):
    path = tmp_path / "events.jsonl"
    with JsonLines(path) as sink:
        assert not path.exists(), "a sink that has heard nothing touches nothing"
        for event in EVENTS:
            sink.emit(event)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == [type(event).__name__.removesuffix("Event") for event in EVENTS]
    assert all(line["schema"] == SCHEMA and line["time"] > 0 for line in lines)
    assert lines[6] | {"time": 0} == {
        "schema": SCHEMA,
        "event": "Committed",
        "time": 0,
        "id": {"run": "gpt", "attempt": 7, "step": 500},
        "bytes": 3 << 30,
        "seconds": 1.75,
        "timing": dict.fromkeys((field.name for field in dataclasses.fields(Timing)), 0.0)
        | {"write_s": 1.5, "bytes": 3 << 30},
    }


def test_json_lines_holds_the_timings_of_several_ranks_as_objects():
    stream = io.StringIO()
    ranks = RankTimings.of([Timing(wait_s=0.5, seconds=1.5), Timing(wait_s=math.nan, seconds=2.5)])
    JsonLines(stream).emit(events.RestoredEvent(ID, 3 << 30, 0.5, ranks=ranks))
    told = json.loads(stream.getvalue())["ranks"]
    assert told["ranks"] == 2 and told["parts"].keys() == {"held_s", "wait_s", "seconds"}
    assert told["parts"]["wait_s"]["each"] == [0.5, "nan"]
    assert told["parts"]["seconds"] == {
        "quantiles": [1.5, 1.5, 1.5, 2.5, 2.5],
        "slowest": [[1, 2.5], [0, 1.5]],
        "each": [1.5, 2.5],
    }


def test_json_lines_appends_writes_at_once_and_names_what_json_lacks(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("earlier\n")
    sink = JsonLines(str(path))
    sink.emit(events.Captured(ID, math.nan))
    sink.emit(events.Warned("\ud800 odd"))
    earlier, first, second = path.read_text().splitlines()
    assert (earlier, json.loads(first)["stall_s"]) == ("earlier", "nan")
    assert json.loads(second)["message"] == "\ud800 odd"
    sink.close()
    sink.emit(events.Warned("again"))
    assert len(path.read_text().splitlines()) == 4
    sink.close()


def test_json_lines_of_threads_and_sinks_do_not_mix(tmp_path):
    path = tmp_path / "events.jsonl"
    sinks = [JsonLines(path), JsonLines(path)]
    message = "x" * 20_000

    def work(sink):
        for _ in range(50):
            sink.emit(events.Warned(message))

    threads = [threading.Thread(target=work, args=(sink,)) for sink in sinks * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [json.loads(line)["message"] for line in path.read_text().splitlines()] == [message] * 200
    for sink in sinks:
        sink.close()


def test_json_lines_to_a_stream_leaves_it_open():
    stream = io.StringIO()
    with JsonLines(stream) as sink:
        sink.emit(EVENTS[6])
    assert json.loads(stream.getvalue())["event"] == "Committed"
    assert not stream.closed


def test_log_levels(caplog):
    caplog.set_level(logging.INFO, logger="tenuto")
    for event in EVENTS:
        LogSink().emit(event)
    told = [(record.levelname, record.getMessage().split()[0]) for record in caplog.records]
    assert told == [
        ("INFO", "saved"),
        ("ERROR", "the"),
        ("WARNING", "skipped"),
        ("INFO", "removed"),
        ("WARNING", "model/embed.weight"),
        ("WARNING", "shared"),
        ("WARNING", "run"),
        ("INFO", "the"),
        ("INFO", "resumed"),
        ("INFO", "run"),
        ("INFO", "resumed"),
        ("WARNING", "step"),
        ("WARNING", "waiting"),
        ("INFO", "run"),
        ("INFO", "SIGTERM:"),
        ("INFO", "SIGINT:"),
        ("INFO", "SIGTERM:"),
        ("INFO", "SIGINT:"),
        ("INFO", "SIGTERM:"),
        ("INFO", "run"),
        ("INFO", "s3://bucket/run"),
    ]


def test_log_does_no_work_when_nobody_listens():
    looked = []

    class Watched(events.Committed):
        def __getattribute__(self, name):
            looked.append(name)
            return super().__getattribute__(name)

    event = Watched(ID, 100, 1.0)
    looked.clear()
    LogSink(logging.Logger("quiet", level=logging.CRITICAL)).emit(event)
    assert looked == []
    LogSink(logging.Logger("loud", level=logging.INFO)).emit(event)
    assert "id" in looked, "somebody who listens is told"


def test_bar_draws_on_a_terminal_and_goes_away():
    terminal = Terminal()
    bar = ProgressBar(terminal, min_bytes=0)
    bar.emit(events.Progress("verify", "gpt [7]", 10, 100))
    bar.emit(events.Progress("save", str(ID), 10, 100))
    bar.emit(events.Progress("verify", "gpt [7]", 100, 100))
    bar.emit(events.Committed(ID, 100, 1.0))
    assert "verifying gpt [7]" in terminal.getvalue()
    assert f"saving {ID}" in terminal.getvalue()
    assert not drawing()


@pytest.mark.parametrize(
    ("phase", "ending"),
    [
        ("save", events.SaveFailedEvent(ID, "broke", "writing")),
        ("restore", events.CandidateSkipped(ID, "rank-00000.safetensors is 3 bytes short")),
        ("save", None),
    ],
)
def test_bar_of_work_that_broke_off_ends(phase, ending):
    bar = ProgressBar(Terminal(), min_bytes=0)
    bar.emit(events.Progress(phase, str(ID), 10, 100))
    assert drawing()
    bar.emit(ending) if ending else bar.close()
    assert not drawing()


def test_bar_shows_nothing_without_a_terminal_nor_for_small_work():
    stream, terminal = io.StringIO(), Terminal()
    for bar in (ProgressBar(stream, min_bytes=0), ProgressBar(terminal)):
        bar.emit(events.Progress("save", str(ID), 10, 1 << 20))
        assert bar._bars is None
        bar.close()
    assert stream.getvalue() == terminal.getvalue() == ""


def test_bar_leaves_stdout_alone(monkeypatch):
    import sys

    bar, out, err = ProgressBar(Terminal(), min_bytes=0), sys.stdout, sys.stderr
    bar.emit(events.Progress("save", str(ID), 10, 100))
    assert (sys.stdout, sys.stderr) == (out, err)
    bar.close()


def test_sinks_stand_behind_an_emitter():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = io.StringIO()
        emitter = events.Emitter.of([JsonLines(lines), LogSink(), ProgressBar(io.StringIO())])
        for event in EVENTS:
            emitter.emit(event)
    assert len(lines.getvalue().splitlines()) == len(EVENTS)
