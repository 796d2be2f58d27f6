"""Following a script of several ranks to its end."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tenuto.certify.probe import EnoughSteps, TrailWriter, order_of
from tenuto.certify.runner import Script
from tenuto.certify.verdict import Row

STEPS = 2
LOOKS = 3


class FirstToLeave:
    """The process that was started: the first of two ranks, which has left. The other tells that it is done some looks
    later."""

    def __init__(self, tellers: Sequence[TrailWriter]) -> None:
        ended = subprocess.Popen(["true"], start_new_session=True)
        self.returncode: int | None = ended.wait()
        self.pid = ended.pid
        self.looks = 0
        self._last = tellers[-1]
        for teller in tellers:
            teller.begin("here", "main")
            for step in range(1, STEPS + 1):
                teller.row(Row(step, 0, 0, {}))
        done(tellers[0])

    def poll(self) -> int | None:
        self.looks += 1
        if self.looks == LOOKS:
            done(self._last)
        return self.returncode

    def wait(self) -> int:
        return 0


def done(teller: TrailWriter) -> None:
    with contextlib.suppress(EnoughSteps):
        teller.leave()


def test_a_rank_that_the_first_one_does_not_wait_for_may_tell_a_little_later(tmp_path: Path) -> None:
    order = order_of("here", str(tmp_path / "scratch"), str(tmp_path / "trail"), last=STEPS, save_at=None)
    process = FirstToLeave([TrailWriter(order, rank, 2) for rank in range(2)])
    log = tmp_path / "log"
    log.touch()

    def launch(command: Sequence[str], environment: Mapping[str, str], log: Path) -> FirstToLeave:
        return process

    trails = Script("uninterrupted", ["train"], order, log, 60.0, launch=launch).run()
    assert [trail.reached for trail in trails] == [STEPS, STEPS]
    assert process.looks >= LOOKS
