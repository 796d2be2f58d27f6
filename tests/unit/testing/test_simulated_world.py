"""The world of random histories: what a killed process leaves behind in this interpreter."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

from campaigns.stateful.world import Process, simulated_world
from tenuto.maintenance.retention import plan_retention
from tenuto.training import retention_worker


def test_a_killed_process_leaves_no_thread_of_retention_behind() -> None:
    """A thread that outlives the world would raise where nobody expects the death of a process any more."""
    begun, go_on = threading.Event(), threading.Event()

    def held(*arguments: Any, **named: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return plan_retention(*arguments, **named)

    with simulated_world(1) as world, mock.patch.object(retention_worker, "plan_retention", held):
        process = Process(world, "main")
        process.open("latest", takeover=False)
        process.change(1.0)
        process.save()
        assert begun.wait(30)
        process.store.dead = True
        threading.Timer(0.2, go_on.set).start()
        process.die()
        assert not [thread for thread in threading.enumerate() if thread.name == "tenuto-retention"]
