"""What a step costs at which nothing is saved: counted in calls, since a clock measures the machine's other work too.

A call inside a training step costs about a microsecond where it finds nothing in the processor's caches.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from torch.utils.data import DataLoader, TensorDataset

import tenuto
from tenuto.integrations.torch.data.resumable import resumable

MOST_CALLS = 60
PER_METRIC = 4


def calls(work: Callable[[], object]) -> Counter[str]:
    """Returns how often each function of Tenuto is called."""
    found: Counter[str] = Counter()
    package = str(Path(tenuto.__file__).parent)

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (frame.f_code.co_filename.startswith(package) or "<" in frame.f_code.co_filename):
            found[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    gc.disable()  # a collection calls what frees the images, files and hooks that other tests have left
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


def test_a_step_that_saves_nothing_makes_few_calls(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(8)}
    with tenuto.Checkpointer(tmp_path, state) as ckpt:
        ckpt.step_done()
        plain, logged = calls(ckpt.step_done), calls(lambda: ckpt.step_done(loss=0.5))
    assert 20 < plain.total() <= MOST_CALLS, plain.most_common()
    assert logged.total() <= plain.total() + PER_METRIC, (logged - plain).most_common()


def test_what_policies_read_costs_little_too(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(8)}
    save = tenuto.on.improve("loss") | tenuto.on.end()
    with tenuto.Checkpointer(tmp_path, state, save=save, keep=tenuto.keep.best(2, "loss")) as ckpt:
        for step in range(1100):  # past those after which metrics that nothing logs are looked for
            ckpt.step_done(loss=0.5)
            if not step:
                ckpt.wait()  # the one save: no later loss is better
        found = calls(lambda: ckpt.step_done(loss=0.5))
    assert ckpt.stats.committed == 2, "with that of the end"
    assert found.total() <= MOST_CALLS + 10, found.most_common()


def test_a_loader_that_counts_itself_adds_few_calls(tmp_path: Path) -> None:
    loader = resumable(DataLoader(TensorDataset(torch.arange(40.0)), batch_size=1))
    with tenuto.Checkpointer(tmp_path, {"weight": torch.zeros(8)}, data=loader) as ckpt:
        ckpt.restore()
        batches = iter(loader)
        next(batches), ckpt.step_done()
        found = calls(lambda: (next(batches), ckpt.step_done()))
    assert found.total() <= MOST_CALLS + 12, found.most_common()
