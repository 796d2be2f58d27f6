"""Who waits for ranks that are behind says for which, in time, and what they do."""

from __future__ import annotations

import threading
from typing import Any

from support.rank_threads import on_ranks
from tenuto.engine.group.group import JobGroup
from tenuto.events import Emitter, RanksBehind
from tenuto.ranks.agreement import Agreement
from tenuto.ranks.session import Session
from tenuto.telemetry.progress import ProgressBar


def test_the_coordinator_tells_whom_it_waits_for_and_what_they_do(monkeypatch: Any) -> None:
    monkeypatch.setattr("tenuto.ranks.session._BEHIND_S", 0.05)
    told: list[RanksBehind] = []
    go_on = threading.Event()

    class Seen:
        def emit(self, event: Any) -> None:
            told.append(event)
            # Rank 1 may be late too: only once it has come is the last that is told of rank 2 alone.
            if len(told) >= 2 and event.ranks == (2,) and "writing its part" in event.doing:
                go_on.set()

    def work(agreement: Agreement) -> None:
        session: Session = agreement.session
        session.behind = JobGroup(agreement, "gpt", Emitter.of([Seen()]))._behind
        with agreement.round("put") as round:
            if agreement.rank == 2:
                agreement.report("writing its part of step 7")
                assert go_on.wait(60)
            round.all_gather(b"", 60.0, "put 7")

    on_ranks(3, work)
    assert {one.ranks for one in told} <= {(2,), (1, 2)} and told[-1].ranks == (2,)
    assert all(one.run == "gpt" and one.phase == "put 7" for one in told)
    assert [one.seconds for one in told] == sorted({one.seconds for one in told})
    assert told[-1].who == "rank 2"


def test_the_bar_on_a_terminal_names_the_ranks_until_the_save_has_ended() -> None:
    import io

    from tenuto.events import Committed
    from tenuto.model.ids import CheckpointId

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    bar = ProgressBar(stream)
    bar.emit(RanksBehind("gpt", "put 7", (2, 5), 2.0, "ranks 2 and 5", "rank 2 (…)"))
    bar.emit(RanksBehind("gpt", "put 7", (5,), 4.0, "rank 5", "rank 5 (…)"))
    assert ("behind", "gpt") in bar._tasks
    assert bar._bars is not None and "waiting for rank 5" in str(bar._bars.tasks[0].description)
    bar.emit(Committed(CheckpointId("gpt", 1, 7), 10, 0.1))
    assert not bar._tasks and bar._bars is None
