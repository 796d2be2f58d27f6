"""capture="fenced", optimizer by optimizer and style by style: each is fenced and right, or eager; and which it is."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import tenuto
from support.fenced_training import (
    HeldCopy,
    Model,
    Told,
    assert_images_are_right,
    bits,
    committed,
    holding,
    loss_of,
    owned,
    snapshot,
    spying,
    stepping,
    tensors_in,
    train,
)
from support.tiny_training import state as numpy_state
from tenuto import every, keep
from tenuto.engine.fence import fence as image_fence
from tenuto.errors import SaveFailed, SaveTorn, UsageError
from tenuto.events import Warned
from tenuto.integrations.torch import device, fence
from tenuto.state import update_barrier

PROBATION = update_barrier.PROBATION
PARAMETERS = {"model/first.weight", "model/first.bias", "model/last.weight", "model/last.bias"}

pytestmark = pytest.mark.filterwarnings("ignore::tenuto.TenutoWarning")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert not update_barrier._barriers, "a fence outlived its Checkpointer"
    assert fence.steps._handle is None, "the hook outlived the last Checkpointer"
    fence.steps.compiled.ran = False


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW for loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_what_an_optimizer_owns_is_fenced_and_right(make: Callable[[Any], torch.optim.Optimizer], place: Path) -> None:
    model = Model()
    optimizer = make(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    told = train(place, state, stepping(model, optimizer))
    assert assert_images_are_right(place, state, told) == list(range(1, 9))
    assert not told.demoted and not told.failed
    # The first three are copied at once; later the parameters and the moments are late, statistics never.
    assert all(not told.late[step] for step in range(1, PROBATION + 1))
    assert all(told.late[step] >= PARAMETERS - told.watched[step] for step in range(PROBATION + 1, 8))
    moments = {path for path in owned(told) if path.startswith("optimizer/state/")}
    assert moments or make is OPTIMIZERS["SGD"]
    assert not any("norm.running" in path or "num_batches" in path for path in owned(told))
    assert not any("param_groups" in path for path in owned(told)), "a learning rate is the schedule's"


def test_the_last_save_of_a_loop_is_eager_since_no_step_follows_it(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    told = train(place, {"model": model, "optimizer": optimizer}, stepping(model, optimizer))
    assert 7 in told.late and 8 not in told.late


def test_eager_is_the_default(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    told = train(place, {"model": model, "optimizer": optimizer}, stepping(model, optimizer), capture="eager")
    assert not told.late and fence.steps._handle is None


def test_a_capture_that_is_neither_is_refused(place: Path) -> None:
    with pytest.raises(UsageError, match="neither 'eager' nor 'fenced'"):
        tenuto.Checkpointer(place, {}, capture="lazy")  # type: ignore[arg-type]


def test_several_optimizers(place: Path) -> None:
    one, other = Model(), Model()
    first = torch.optim.Adam(one.parameters(), lr=0.01)
    second = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    state = {"one": one, "other": other, "optimizers": [first, second]}

    def body(step: int) -> None:
        stepping(one, first)(step)
        stepping(other, second)(step)

    told = train(place, state, body)
    assert_images_are_right(place, state, told)
    assert {"one/first.weight", "other/first.weight"} <= owned(told) and not told.demoted


def test_an_optimizer_that_rests_is_eager_until_it_steps_again(place: Path) -> None:
    one, other = Model(), Model()
    first = torch.optim.Adam(one.parameters(), lr=0.01)
    second = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    state = {"one": one, "other": other, "first": first, "second": second}

    def body(step: int) -> None:
        stepping(one, first)(step)
        if step % 2 == 0:
            stepping(other, second)(step)

    told = train(place, state, body, steps=12)
    assert_images_are_right(place, state, told)
    # It owned nothing in every other save, so its own probation lasts until the fifth.
    assert all("one/first.weight" in told.late[step] | told.watched[step] for step in range(4, 12))
    assert all("other/first.weight" in told.watched[step] for step in (1, 3, 5))
    assert not any("other/first.weight" in told.late[step] for step in (1, 2, 3, 4, 5, 6, 8, 10))
    assert all("other/first.weight" in told.late[step] | told.watched[step] for step in (7, 9, 11))


def test_an_optimizer_that_begins_late_has_a_probation_of_its_own(place: Path) -> None:
    """Its leaves were part of the structure all along, so nothing begins anew with its first step."""
    one, other = Model(), Model()
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    state = {"one": one, "other": other, "first": first, "second": second}

    def body(step: int) -> None:
        if step > PROBATION:
            other.last.weight.data.mul_(0.9)  # no count of changes shows it
        stepping(one, first)(step)
        if step >= PROBATION:
            stepping(other, second)(step)

    told = train(place, state, body, steps=12)
    assert assert_images_are_right(place, state, told) == list(range(1, 13))
    assert "one/first.weight" in told.late[PROBATION + 1], "its own is over"
    assert set(told.demoted) == {"other/last.weight"} and "other/last.weight" not in owned(told)
    assert "other/first.weight" in owned(told)


def test_lbfgs_is_right_and_on_probation_while_its_history_grows(place: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, history_size=3, max_iter=2)
    state = {"model": model, "optimizer": optimizer}

    def body(step: int) -> None:
        batch = torch.randn(4, 8)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    told = train(place, state, body, steps=12)
    assert_images_are_right(place, state, told)
    assert not told.late[3] and "model/weight" in told.late[11]


def test_steps_that_grad_scaler_skips(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}

    def body(step: int) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if step == 5:
            next(model.parameters()).grad[0] = float("inf")  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()

    told = train(place, state, body)
    assert_images_are_right(place, state, told)
    assert told.late[5] and not told.late[6], "no step was seen before save 6, so nothing is known to wait"
    assert told.late[7] and not told.demoted


def test_accumulated_gradients(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}

    def body(step: int) -> None:
        (loss_of(model) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()

    told = train(place, state, body, steps=14)
    assert_images_are_right(place, state, told)
    # A save right after an update is fenced; one in the middle of a group has seen no step and is eager.
    assert all(bool(told.late[step]) == (step % 2 == 0) for step in range(8, 14)), told.late


def test_the_optimizer_inside_the_backward_pass(place: Path) -> None:
    model = Model()
    each = {name: torch.optim.SGD([one], lr=0.1, momentum=0.9) for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        one.register_post_accumulate_grad_hook(lambda tensor, own=each[name]: (own.step(), own.zero_grad())[1])
    state = {"model": model, "optimizers": each}
    told = train(place, state, lambda step: loss_of(model).backward())
    assert_images_are_right(place, state, told)
    assert owned(told) >= PARAMETERS and not told.demoted


def test_an_optimizers_load_state_dict_between_a_save_and_the_next_step(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    before = copy.deepcopy(optimizer.state_dict())

    def body(step: int) -> None:
        if step == 5:
            optimizer.load_state_dict(before if step == 4 else copy.deepcopy(optimizer.state_dict()))
        stepping(model, optimizer)(step)

    told = train(place, state, body)
    assert_images_are_right(place, state, told)  # it makes new tensors: the image holds the old ones
    assert not told.failed


def test_a_modules_load_state_dict_writes_in_place_and_is_noticed(place: Path, held_copy: HeldCopy) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    other = copy.deepcopy(model.state_dict())

    def body(step: int) -> None:
        if step == 5:
            model.load_state_dict(other)
        held_copy.let_go()
        stepping(model, optimizer)(step)
        if step == 4:
            held_copy.hold()
        if step == 5:
            waited = time.monotonic()
            while 5 not in told.failed:  # the next save may be taken before the writer has found this one torn
                assert time.monotonic() - waited < 60
                time.sleep(0.01)

    told = Told()
    train(place, state, body, told=told)
    steps = assert_images_are_right(place, state, told)
    assert 5 not in steps and 6 in steps, "the torn save is not committed; an eager one takes its place"
    assert "changed in place" in told.failed[5] and 6 not in told.late
    assert "model/first.weight" in told.demoted and "model/first.weight" not in told.late[7]


def test_fence_lets_a_module_load_between_steps(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    other = copy.deepcopy(model.state_dict())
    told = Told()
    kwargs: dict[str, Any] = {"save": every(steps=1), "keep": keep.all(), "sinks": [told], "capture": "fenced"}
    with spying(told), tenuto.Checkpointer(place, state, **kwargs) as ckpt:
        for step in ckpt.steps(8):
            if step == 5:
                ckpt.fence()
                model.load_state_dict(other)
            stepping(model, optimizer)(step)
            told.snapshots[step + 1] = snapshot(state)
    assert assert_images_are_right(place, state, told) == list(range(1, 9))
    assert not told.demoted and told.late[5] and told.late[6]


def test_averages_and_target_networks_are_eager(place: Path) -> None:
    model, target = Model(), Model()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "average": average, "target": target, "optimizer": optimizer}

    def body(step: int) -> None:
        stepping(model, optimizer)(step)
        average.update_parameters(model)
        with torch.no_grad():
            for one, other in zip(target.parameters(), model.parameters(), strict=True):
                one.lerp_(other, 0.1)

    told = train(place, state, body)
    assert_images_are_right(place, state, told)
    assert owned(told) and not any(path.startswith(("average", "target")) for path in owned(told))


def test_an_embedding_that_keeps_a_norm_is_eager_from_the_first_save(place: Path) -> None:
    model = nn.Sequential(nn.Embedding(16, 8, max_norm=1.0), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}

    def body(step: int) -> None:
        optimizer.zero_grad()
        model(torch.randint(16, (4,))).square().sum().backward()
        optimizer.step()

    told = train(place, state, body)
    assert_images_are_right(place, state, told)
    assert "model/1.weight" in owned(told) and "model/0.weight" not in owned(told)
    assert not any("model/0.weight" in paths for paths in told.watched.values()) and not told.demoted


def test_parameters_swapped_through_data_keep_the_memory_of_the_save(place: Path, held_copy: HeldCopy) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}

    def body(step: int) -> None:
        if step == 5:
            for one in model.parameters():
                one.data = one.data.clone() + 1.0
        held_copy.let_go()
        stepping(model, optimizer)(step)
        if step == 4:
            held_copy.hold()

    told = train(place, state, body)
    assert assert_images_are_right(place, state, told) == list(range(1, 9))
    assert told.late[5] >= PARAMETERS - told.watched[5] and told.late[6]


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_module_that_changes_its_dtype_is_copied_as_a_whole(
    place: Path, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Each Parameter is the same object before and after, of another size."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32)).to(dtypes[0])  # in one order in the image
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = PROBATION + 2

    def body(step: int) -> None:
        if step == at:
            model.to(dtypes[1])
        stepping(model, optimizer)(step)

    told = train(place, {"model": model, "optimizer": optimizer}, body, steps=at + PROBATION + 5)
    assert committed(place) == list(range(1, at + PROBATION + 6)) and not told.demoted
    assert told.late[at] and told.late[at + PROBATION + 2], "it is fenced before and after"
    for step, wanted in told.snapshots.items():
        found = dict(tensors_in(tenuto.load(place, step=step).state))
        for path, tensor in wanted.items():
            assert found[path].dtype == tensor.dtype and torch.equal(bits(found[path]), bits(tensor)), (step, path)


def test_parameters_given_larger_memory_are_copied_as_a_whole(place: Path) -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = PROBATION + 2

    def body(step: int) -> None:
        if step == at:
            model.weight.data = torch.cat([model.weight.data, torch.randn(8, 8)])
            model.weight.grad = None
        stepping(model, optimizer)(step)

    told = train(place, {"model": model, "optimizer": optimizer}, body, steps=at + PROBATION + 5)
    assert told.late[at + PROBATION + 2] and not told.demoted
    for step, wanted in told.snapshots.items():
        found = dict(tensors_in(tenuto.load(place, step=step).state))
        assert torch.equal(found["/model/weight"], wanted["/model/weight"]), step


def test_a_step_recorded_into_a_cuda_graph_is_eager_and_it_says_so(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    told = Told()

    def body(step: int) -> None:
        capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=step == 4)
        with capturing, mock.patch.object(torch.cuda, "is_initialized", return_value=True):
            stepping(model, optimizer)(step)

    train(place, {"model": model, "optimizer": optimizer}, body, told=told)
    assert told.late[4] and not told.late.get(5) and not told.late[7], (
        "what was recorded once is replayed without hooks"
    )
    assert any(isinstance(event, Warned) and "CUDA graph" in event.message for event in told.events)


def test_an_optimizer_without_hooks_is_eager_and_it_says_so_once(place: Path) -> None:
    model = nn.Linear(8, 8)

    class Unhooked(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for one in self.param_groups[0]["params"]:
                    one.sub_(one.grad, alpha=0.1)

    optimizer = Unhooked(model.parameters(), lr=0.1)
    Unhooked.step = Unhooked.step.__wrapped__  # type: ignore[attr-defined,method-assign]
    state = {"model": model, "optimizer": optimizer}
    told = train(place, state, stepping(model, optimizer))
    assert_images_are_right(place, state, told)
    assert not owned(told) and not any(told.watched.values())
    said = [event.message for event in told.events if isinstance(event, Warned) and "was not seen" in event.message]
    assert len(said) == 1


def said(told: Told, words: str) -> list[str]:
    return [event.message for event in told.events if isinstance(event, Warned) and words in event.message]


def test_an_optimizer_inside_an_object_is_not_seen_and_it_says_so_once(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    class Trainer:
        def state_dict(self) -> dict[str, Any]:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

        def load_state_dict(self, found: dict[str, Any]) -> None:
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])

    state = {"trainer": Trainer()}
    told = train(place, state, stepping(model, optimizer), steps=PROBATION + 1)
    assert assert_images_are_right(place, state, told) == [1, 2, 3, 4]
    assert not owned(told) and not any(told.watched.values())
    assert len(said(told, "no optimizer")) == 1


def test_an_optimizer_that_is_made_later_is_not_called_missing(place: Path) -> None:
    model, state = Model(), dict[str, Any]()
    state["model"] = model

    def body(step: int) -> None:
        if step == PROBATION - 1:
            state["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss_of(model).backward()
        if "optimizer" in state:
            state["optimizer"].step()

    told = train(place, state, body, steps=2 * PROBATION + 2)
    assert owned(told) >= PARAMETERS and not said(told, "no optimizer")


def test_weights_that_are_not_contiguous_are_eager_and_it_says_how_many_once(place: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3, bias=False)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(step: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 4, 8, 8)).square().mean().backward()
        optimizer.step()

    told = train(place, {"model": model, "optimizer": optimizer}, body)
    assert owned(told) == {"model/0.bias"} and not told.demoted
    (message,) = said(told, "not contiguous")
    assert message.startswith("2 of 3 leaves that optimizers own are captured eagerly, model/")


# -- writers other than the step ---------------------------------------------------------------------------------------


@pytest.fixture
def held_copy() -> Iterator[HeldCopy]:
    with holding() as held:
        yield held


def test_a_writer_past_every_count_is_found_in_the_probation(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}

    def body(step: int) -> None:
        model.last.weight.data.mul_(0.9)  # a weight decay of one's own; no count of changes shows it
        stepping(model, optimizer)(step)

    told = train(place, state, body)
    assert assert_images_are_right(place, state, told) == list(range(1, 9))
    assert set(told.demoted) == {"model/last.weight"} and "model/last.weight" not in owned(told)
    assert "model/first.weight" in owned(told)


def test_weights_swapped_in_and_out_again_are_found_in_the_probation(place: Path) -> None:
    """They are back before the step, so the comparison there sees nothing: the slices are compared on the way too."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    compared = threading.Event()
    compare_slices = image_fence.Fence._compare_slices

    def patched(self: image_fence.Fence) -> None:
        swapped.wait(60)
        compare_slices(self)
        compared.set()

    swapped = threading.Event()

    def body(step: int) -> None:
        if step == 1:
            kept = model.first.weight.data.clone()
            model.first.weight.data.zero_()
            swapped.set()
            assert compared.wait(60)
            model.first.weight.data.copy_(kept)
        stepping(model, optimizer)(step)

    with mock.patch.object(image_fence.Fence, "_compare_slices", patched):
        told = train(place, state, body)
    assert assert_images_are_right(place, state, told) == list(range(1, 9))
    assert set(told.demoted) == {"model/first.weight"}


def test_a_late_writer_that_counts_tears_and_is_not_committed(place: Path, held_copy: HeldCopy) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}

    def body(step: int) -> None:
        if step == 6:
            with torch.no_grad():
                model.last.weight.clamp_(-0.01, 0.01)
        held_copy.let_go()
        stepping(model, optimizer)(step)
        if step == 5:
            held_copy.hold()

    told = train(place, state, body, steps=9)
    steps = assert_images_are_right(place, state, told)
    assert steps == [1, 2, 3, 4, 5, 7, 8, 9]
    assert list(told.failed) == [6] and "model/last.weight" in told.failed[6]
    assert set(told.demoted) == {"model/last.weight"} and "model/last.weight" not in told.late[8]


def test_a_late_writer_past_every_count_that_meets_the_sample_tears_and_is_not_committed(
    place: Path, held_copy: HeldCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_barrier, "SAMPLE", 1 / 3)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    told = Told()

    def body(step: int) -> None:
        if step == 5:
            assert held_copy.reached.wait(60)
            for one in model.parameters():
                one.data.clamp_(-0.01, 0.01)
        held_copy.let_go()
        stepping(model, optimizer)(step)
        if step == 4:
            held_copy.hold()
        if step == 5:
            told.await_end_of(5)

    train(place, state, body, told=told)
    assert assert_images_are_right(place, state, told) == [1, 2, 3, 4, 6, 7, 8]
    assert set(told.torn) == set(told.failed) == {5} and "by what no count of changes shows" in told.failed[5]
    assert told.torn[5] <= told.late[5] and told.torn[5] <= set(told.demoted)
    assert 6 not in told.late


def test_a_change_after_the_copy_demotes_and_the_save_stands(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    last: list[tenuto.Checkpointer] = []

    def body(step: int) -> None:
        if step == 6:
            last[0].wait()
            with torch.no_grad():
                model.last.weight.clamp_(-0.01, 0.01)
        stepping(model, optimizer)(step)

    with mock.patch.object(tenuto.Checkpointer, "steps", _noting(last)):
        told = train(place, state, body, steps=9)
    assert assert_images_are_right(place, state, told) == list(range(1, 10))
    assert set(told.demoted) == {"model/last.weight"} and not told.failed


def _noting(seen: list[tenuto.Checkpointer]) -> Any:
    steps = tenuto.Checkpointer.steps

    def patched(self: tenuto.Checkpointer, n: int | None = None) -> Any:
        seen.append(self)
        return steps(self, n)

    return patched


def test_a_torn_save_raises_where_it_is_waited_for_and_ends_no_training(place: Path, held_copy: HeldCopy) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    more: dict[str, Any] = {"capture": "fenced", "on_error": "raise", "keep": keep.all()}
    with spying(Told()), tenuto.Checkpointer(place, state, **more) as ckpt:
        for step in range(5):
            stepping(model, optimizer)(step)
            ckpt.step_done()
            if step == 4:
                held_copy.hold()
            save = ckpt.save()
        with torch.no_grad():
            model.first.weight.zero_()
        held_copy.let_go()
        with pytest.raises(SaveTorn, match=r"model/first\.weight") as told:
            save.wait()
        assert told.value.subject == "model/first.weight" and "ckpt.fence()" in str(told.value)
        stepping(model, optimizer)(5)
        ckpt.step_done()  # raises nothing, and takes the save that was lost
        ckpt.wait()
    assert committed(place) == [1, 2, 3, 4, 6]


# -- what is never late ------------------------------------------------------------------------------------------------


def test_a_save_that_is_waited_for_is_eager(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    told = Told()
    with spying(told), tenuto.Checkpointer(place, state, capture="fenced") as ckpt:
        for step in range(6):
            stepping(model, optimizer)(step)
            ckpt.step_done()
            ckpt.save(wait=True)
    assert not told.late and committed(place)[-1] == 6


def test_an_image_that_goes_through_a_window_is_eager_and_it_says_so(place: Path) -> None:
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    told = train(place, state, stepping(model, optimizer, width=1024), steps=5, memory_budget=3 << 20)
    assert_images_are_right(place, state, told)
    assert not told.late
    assert sum("does not fit into memory" in str(getattr(event, "message", "")) for event in told.events) == 1


def test_without_torchs_optimizers_everything_is_eager(place: Path) -> None:
    told = Told()
    one = numpy_state()
    kwargs: dict[str, Any] = {"save": every(steps=1), "keep": keep.all(), "sinks": [told], "capture": "fenced"}
    with spying(told), tenuto.Checkpointer(place, one, **kwargs) as ckpt:
        for step in ckpt.steps(5):
            one["w"] += np.float32(step)
            ckpt.fence()
    assert not owned(told) and committed(place) == [1, 2, 3, 4, 5]


# -- the fence itself --------------------------------------------------------------------------------------------------


def test_the_step_waits_for_the_copy_and_says_how_long(place: Path, held_copy: HeldCopy) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    with spying(Told()), tenuto.Checkpointer(place, state, capture="fenced", keep=keep.all()) as ckpt:
        for step in range(5):
            stepping(model, optimizer)(step)
            ckpt.step_done()
            if step == 4:
                held_copy.hold()
            save = ckpt.save()
        wanted = snapshot(state)
        stepped = threading.Event()

        def go_on() -> None:
            stepping(model, optimizer)(5)
            stepped.set()

        thread = threading.Thread(target=go_on)
        thread.start()
        assert not stepped.wait(0.05), "the update went past a copy that is still to come"
        held_copy.let_go()
        thread.join(60)
        assert stepped.is_set()
        save.wait()
        assert save.fence_s > 0.0
    found = tenuto.load(place, step=5).state["model"]["first.weight"]
    assert torch.equal(found, wanted["/model/first.weight"])


def test_a_handle_that_is_kept_keeps_no_image_mapped(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    saves, fences = [], []
    gc.disable()
    try:
        with spying(Told()), tenuto.Checkpointer(place, state, capture="fenced", keep=keep.all()) as ckpt:
            saver = ckpt._armed(needed=True).saving.saver
            for step in range(6):
                stepping(model, optimizer)(step)
                ckpt.step_done()
                saves.append(ckpt.save())
                assert saver.fencing is not None and saver.fencing._current is not None
                fences.append(weakref.ref(saver.fencing._current))
                assert all(fence() is None for fence in fences[:-1])
        assert fences[-1]() is None and all(save.committed for save in saves)
    finally:
        gc.enable()


def test_an_update_does_not_wait_for_ever(place: Path, held_copy: HeldCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    with spying(Told()), tenuto.Checkpointer(place, state, capture="fenced", keep=keep.all()) as ckpt:
        for step in range(5):
            stepping(model, optimizer)(step)
            ckpt.step_done()
            if step == 4:
                ckpt.wait()
                monkeypatch.setattr(image_fence, "DEADLINE_S", 0.05)
                held_copy.hold()
            save = ckpt.save()
        before = model.first.weight.detach().clone()
        stepping(model, optimizer)(5)
        assert not torch.equal(before, model.first.weight), "training goes on"
        held_copy.let_go()
        with pytest.raises(SaveFailed, match="did not end within"):
            save.wait(60)
    assert 5 not in committed(place)


def test_a_copy_that_fails_fails_its_save_and_not_the_training(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    copy_one, failing = device.HostCopies.copy, threading.Event()

    def patched(self: device.HostCopies, number: int) -> None:
        if failing.is_set() and threading.current_thread().name.startswith("tenuto-fence"):
            raise OSError("a page is gone")
        copy_one(self, number)

    def body(step: int) -> None:
        stepping(model, optimizer)(step)
        failing.set() if step == 5 else failing.clear()

    with mock.patch.object(device.HostCopies, "copy", patched):
        told = train(place, state, body)
    assert assert_images_are_right(place, state, told) == [1, 2, 3, 4, 5, 7, 8]
    assert "a page is gone" in told.failed[6]


def fences() -> int:
    """Returns how many of the hooks before each optimizer's step wait for copies."""
    return sum(hook is fence._before_step for hook in torch_optimizer._global_optimizer_pre_hooks.values())


def test_copying_and_pickling_an_optimizer_is_what_it_was(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with spying(Told()), tenuto.Checkpointer(place, {"model": model, "optimizer": optimizer}, capture="fenced"):
        stepping(model, optimizer)(0)
        twin = copy.deepcopy(optimizer)
        assert not optimizer._optimizer_step_pre_hooks and not twin._optimizer_step_pre_hooks
        assert b"tenuto" not in pickle.dumps(optimizer)
        twin.step()
    assert fences() == 0


def test_a_copied_optimizer_in_its_place_has_to_be_seen_first(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}

    def body(step: int) -> None:
        stepping(state["model"], state["optimizer"])(step)
        if step == 4:
            state["model"], state["optimizer"] = copy.deepcopy((state["model"], state["optimizer"]))

    told = train(place, state, body)
    assert_images_are_right(place, state, told)
    assert told.late[4] and not told.late[5] and told.late[7]


def test_two_checkpointers_and_the_hook_goes_with_the_last(place: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    with tenuto.Checkpointer(place / "a", state, capture="fenced"):
        with tenuto.Checkpointer(place / "b", state, capture="fenced"):
            assert fences() == 1
        assert fences() == 1
    assert fences() == 0


def test_a_forked_child_steps_without_waiting(place: Path, held_copy: HeldCopy) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with spying(Told()), tenuto.Checkpointer(place, state, capture="fenced") as ckpt:
        for step in range(5):
            stepping(model, optimizer)(step)
            ckpt.step_done()
            if step == 4:
                held_copy.hold()
            save = ckpt.save()
        for one in model.parameters():
            one.grad = torch.ones_like(one)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            with torch.no_grad():
                fence._before_step(optimizer, (), {})  # would wait for a thread that the child does not have
            os._exit(fences())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held_copy.let_go()
        save.wait()


def test_a_load_into_the_training_waits_for_the_copy(place: Path, held_copy: HeldCopy) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    told = Told()
    with spying(told), tenuto.Checkpointer(place, state, capture="fenced", keep=keep.all(), sinks=[told]) as ckpt:
        for step in range(5):
            stepping(model, optimizer)(step)
            ckpt.step_done()
            if step == 4:
                held_copy.hold()
            save = ckpt.save()
            told.snapshots[step + 1] = snapshot(state)
        threading.Timer(0.05, held_copy.let_go).start()
        tenuto.load(place, into=state, step=1)
        save.wait()
    assert_images_are_right(place, state, told)
    assert committed(place) == [1, 2, 3, 4, 5] and not told.demoted
