"""What is saved of a training that an error ends: the newest state that it has sealed in memory becomes a checkpoint.

The state of the step that failed is not saved: nobody knows how much of it has changed.
"""

from __future__ import annotations

from tenuto.concurrency.deadlines import within
from tenuto.errors import TenutoError
from tenuto.maintenance.flush import Flushed, execute, plan_flush
from tenuto.model.ids import run_key
from tenuto.training.saves import RunSaver


def save_what_is_sealed(saving: RunSaver, timeout: float) -> None:
    """Writes the newest state in memory to the store, once the run is given back, within `timeout` seconds. Reports
    what it has saved, and what keeps it from that; raises nothing.

    Under a supervisor the image is left where it is: the next start resumes from it at once, and the supervisor saves
    it where there is none. Of several ranks all images are needed, which `tenuto flush` finds once they have ended.
    """
    if saving.memory is None or saving.attempt is None or saving.heartbeat.on or not saving.group.writes_all:
        return
    run = run_key(saving.run)

    def write() -> Flushed | None:
        return execute(saving.repo, plan_flush(saving.repo, run), report=saving.report)

    try:
        flushed = within(timeout, f"saving what run {saving.run} has in memory", write, subject=saving.run)
    except TenutoError as error:
        saving.report(f"what lies in memory is not saved: {error}")
        return
    if flushed is not None:
        saving.report(f"step {flushed.image.step} was in memory alone, and is saved: {flushed.id}")
