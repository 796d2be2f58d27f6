"""Tenuto on a CUDA device, as a training uses it: every image bit for bit what the state was when it was saved."""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import tenuto
from support.fenced_training import Told, assert_images_are_right, bits, committed, owned, snapshot
from tenuto import every, keep, on
from tenuto.engine.fence import fence as image_fence
from tenuto.engine.save import fenced_capture
from tenuto.engine.staging import pool
from tenuto.events import Warned
from tenuto.integrations.torch import device, fence
from tenuto.model.leaf import LeafSpec
from tenuto.state.update_barrier import PROBATION

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device here", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")

SCRIPT = Path(__file__).with_name("cuda_program.py")
MIB = 1 << 20
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW for loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True, foreach=True),
    "AdamW fused capturable": lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


class Network(nn.Module):
    def __init__(self, width: int = 512, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.width = width
        self.first = nn.Linear(width, 4 * width, dtype=dtype)
        self.norm = nn.BatchNorm1d(4 * width, dtype=dtype)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(batch)))))


def network(width: int = 512, dtype: torch.dtype = torch.float32) -> Network:
    return Network(width, dtype).cuda()


def loss_of(model: Network) -> torch.Tensor:
    weight = model.first.weight
    batch = torch.randn(64, model.width, dtype=weight.dtype, device=weight.device)
    return (model(batch) - batch).float().square().mean()


def step_of(model: Network, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    def body(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    return body


@contextmanager
def watching(told: Told) -> Iterator[None]:
    """`told` learns which leaves were late in which save; nothing else is changed."""

    class Watched(image_fence.Fence):
        def __init__(self, flattened: Any, choice: Any, places: Any, observer: Any, *, pace: Any, name: str) -> None:
            step = int(name.rpartition("-")[2])
            told.late[step] = {flattened.specs[span.leaf].path for span in choice.late}
            told.watched[step] = {flattened.specs[span.leaf].path for span in choice.watched}
            super().__init__(flattened, choice, places, observer, pace=pace, name=name)

    with mock.patch.object(fenced_capture, "Fence", Watched):
        yield


def train(where: Path, state: dict[str, Any], body: Callable[[int], object], *, steps: int = 10, **more: Any) -> Told:
    """Trains, saves after every step, and keeps a clone of what the state was then."""
    told = Told()
    more = {"save": every(steps=1), "keep": keep.all(), "sinks": [told], **more}
    with watching(told), tenuto.Checkpointer(where, state, **more) as ckpt:
        for step in ckpt.steps(steps):
            body(step)
            told.snapshots[step + 1] = snapshot(state)
    return told


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (value.detach().resolve_conj().resolve_neg().cpu() for value in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [path for path in wanted if not same(found[path], wanted[path])] == []


def messages(told: Told) -> list[str]:
    return [event.message for event in told.events if isinstance(event, Warned)]


def program(place: Path, *words: str, status: int = 0, **variables: str) -> dict[str, Any]:
    """Runs the program beside this file, and returns what it has written."""
    out = place / f"{'-'.join([*words, *variables.values()])}-{len(list(place.glob('*.json')))}.json"
    root = Path(__file__).parents[2]
    environment = (
        os.environ
        | variables
        | {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]),
        }
    )
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(place), str(out), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(out.read_text()) if out.exists() else {}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert fence.steps._handle is None, "the hook outlived the last Checkpointer"
    fence.steps.compiled.ran = False


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "place"


# -- eager -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_eager_saves_hold_the_state_of_their_step_while_training_goes_on(make: Make, place: Path) -> None:
    model = network()
    optimizer = make(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    told = train(place, state, step_of(model, optimizer), in_flight=3)
    assert not told.failed and assert_images_are_right(place, state, told) == list(range(1, 11))


def test_several_large_saves_in_flight(place: Path) -> None:
    model = network(1600)  # 80 MB of weights, 240 MB with the moments
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    told = train(place, state, step_of(model, optimizer), steps=5, in_flight=3)
    assert not told.failed and assert_images_are_right(place, state, told) == [1, 2, 3, 4, 5]


def test_a_save_waits_for_work_that_is_still_queued(place: Path) -> None:
    weight = torch.zeros(4 << 20, device="cuda")
    with tenuto.Checkpointer(place, {"weight": weight}, keep=keep.all()) as ckpt:
        for step in range(1, 6):
            torch.cuda._sleep(50_000_000)
            weight.fill_(step)
            ckpt.step_done()
            save = ckpt.save()
            weight.fill_(-1.0)
            save.wait()
            assert bool((tenuto.load(place, step=step).state["weight"] == step).all())


@pytest.mark.parametrize("capture", ["eager", "fenced"])
def test_a_training_on_a_stream_of_its_own(place: Path, capture: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        told = train(place, state, step_of(model, optimizer), capture=capture)
        assert not told.failed and assert_images_are_right(place, state, told) == list(range(1, 11))
    torch.cuda.synchronize()


@pytest.mark.parametrize("capture", ["eager", "fenced"])
def test_a_side_stream_that_the_current_one_waits_for(place: Path, capture: str) -> None:
    model = network()
    extra = torch.zeros(8 << 20, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer, "extra": extra}
    side = torch.cuda.Stream()

    def body(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            optimizer.step()
            extra.fill_(float(step + 1))
        torch.cuda.current_stream().wait_stream(side)

    told = train(place, state, body, capture=capture)
    assert not told.failed and assert_images_are_right(place, state, told) == list(range(1, 11))
    assert bool((tenuto.load(place, step=4).state["extra"] == 4).all())


# -- fenced ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_what_an_optimizer_owns_is_fenced_and_right(make: Make, place: Path) -> None:
    model = network()
    optimizer = make(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    told = train(place, state, step_of(model, optimizer), capture="fenced", steps=PROBATION + 8)
    assert not told.failed and not told.demoted, (told.failed, told.demoted)
    assert assert_images_are_right(place, state, told) == list(range(1, PROBATION + 9))
    # The sample is watched, and may be all of one leaf; the last save has no step behind it.
    for step in range(PROBATION + 2, PROBATION + 7):
        assert {"model/first.weight", "model/last.weight"} <= told.late[step] | told.watched[step]
        assert told.late[step], f"nothing was late in save {step}"
    assert any(path.startswith("optimizer/state/") for path in owned(told))


def test_fenced_bf16_weights(place: Path) -> None:
    model = network(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    told = train(place, state, step_of(model, optimizer), capture="fenced")
    assert not told.failed and not told.demoted
    assert assert_images_are_right(place, state, told) == list(range(1, 11)) and "model/first.weight" in owned(told)


@pytest.mark.parametrize("fused", [True, False])
def test_fenced_with_autocast_and_a_scaler_that_skips_steps(place: Path, fused: bool) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=not fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    scales: dict[int, float] = {}

    def body(step: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        if step == 5:
            model.first.weight.grad[0] = float("inf")  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        scales[step + 1] = scaler.get_scale()

    told = train(place, state, body, capture="fenced")
    assert not told.failed and not told.demoted and owned(told)
    assert assert_images_are_right(place, state, told) == list(range(1, 11))
    for step, scale in scales.items():
        tenuto.load(place, into=state, step=step)
        assert scaler.get_scale() == scale


def test_an_in_place_change_between_save_and_step_is_noticed(place: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    plain = step_of(model, optimizer)

    def body(step: int) -> None:
        if step == PROBATION + 3:
            with torch.no_grad():
                model.first.weight.mul_(0.5)
        plain(step)

    told = train(place, state, body, capture="fenced", steps=PROBATION + 7)
    assert_images_are_right(place, state, told)  # what is committed is right; a torn save is not committed
    assert "model/first.weight" in told.demoted


def test_writing_through_data_at_each_step_is_noticed_in_the_probation(place: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    plain = step_of(model, optimizer)

    def body(step: int) -> None:
        model.last.weight.data.mul_(0.99)
        plain(step)

    told = train(place, state, body, capture="fenced")
    assert set(told.demoted) == {"model/last.weight"} and not told.failed
    assert assert_images_are_right(place, state, told) == list(range(1, 11))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["the same stream", "another stream"])
def test_writing_everything_through_data_once_commits_nothing_torn(place: Path, elsewhere: bool) -> None:
    model = network(1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    plain = step_of(model, optimizer)
    side = torch.cuda.Stream()

    def body(step: int) -> None:
        if step == PROBATION + 3:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side if elsewhere else torch.cuda.current_stream()):
                for one in [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]:
                    if one.is_cuda and one.numel() > 1:
                        one.data.mul_(0.5)
            torch.cuda.current_stream().wait_stream(side)
        plain(step)

    told = train(place, state, body, capture="fenced", steps=PROBATION + 7)
    assert_images_are_right(place, state, told)
    assert told.demoted or told.failed, "nobody has noticed it"


@pytest.mark.parametrize("which", ["parameters", "one"])
def test_writing_a_few_leaves_through_data_once_commits_nothing_torn(place: Path, which: str) -> None:
    """The sample does not look at them: their probes do, which are read again behind the copies."""
    model = network(1600)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    side = torch.cuda.Stream()

    def body(step: int) -> None:
        if step >= PROBATION + 3:
            with torch.cuda.stream(side):  # beside the copies, and mostly before their end
                for one in [model.last.weight] if which == "one" else list(model.parameters()):
                    one.data.mul_(0.5)
            torch.cuda.current_stream().wait_stream(side)
        optimizer.step()

    told = train(place, state, body, capture="fenced", steps=PROBATION + 9)
    assert_images_are_right(place, state, told)
    assert told.demoted or told.failed, "nobody has noticed it"


def test_fence_lets_such_code_write(place: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    told = Told()
    more: dict[str, Any] = {"save": every(steps=1), "keep": keep.all(), "sinks": [told], "capture": "fenced"}
    with watching(told), tenuto.Checkpointer(place, state, **more) as ckpt:
        for step in ckpt.steps(PROBATION + 7):
            if step > PROBATION + 1:
                ckpt.fence()
                for one in model.parameters():
                    one.data.mul_(0.9)
            step_of(model, optimizer)(step)
            told.snapshots[step + 1] = snapshot(state)
    assert assert_images_are_right(place, state, told) == list(range(1, PROBATION + 8))
    assert not told.demoted and not told.failed and told.late[PROBATION + 5]


@pytest.mark.parametrize("moves", [True, False])
def test_an_image_longer_than_its_window(place: Path, moves: bool) -> None:
    """The window's memory moves along, or lies at several addresses: the driver must not hold on to it."""
    state = {f"w{number}": torch.randn(3 << 20, device="cuda") for number in range(64)}  # 768 MiB
    before = dict(device._pinned)
    with mock.patch.object(pool, "can_move", lambda: moves):
        tenuto.save(state, place)
    assert device._pinned == before
    assert_same(tenuto.load(place).state, state)


def test_the_step_is_ordered_behind_a_slow_copy(place: Path) -> None:
    """The device's update comes right after the save: nothing but the fence keeps it behind the copies."""
    model = network(1600)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1, fused=True)
    state = {"model": model, "optimizer": optimizer}
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    told = train(place, state, lambda step: optimizer.step(), capture="fenced", steps=PROBATION + 6)
    assert assert_images_are_right(place, state, told) == list(range(1, PROBATION + 7))
    assert owned(told) and not told.demoted and not told.failed


# -- graphs and compilers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["eager", "fenced"])
def test_a_graph_that_is_recorded_while_a_save_is_on_its_way(place: Path, capture: str) -> None:
    """Whoever waits for the device in another thread must not spoil the recording."""
    model = network(1600)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    value, told = torch.ones(8, device="cuda"), Told()
    graphs = []
    more: dict[str, Any] = {"save": on.signal(), "keep": keep.all(), "sinks": [told], "capture": capture}
    with watching(told), tenuto.Checkpointer(place, state, **more) as ckpt:
        for step in range(PROBATION + 6):
            optimizer.step()
            told.snapshots[step + 1] = snapshot(state)
            ckpt.step_done()
            save = ckpt.save()
            if step > PROBATION + 1:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    doubled = value * 2
                    save.wait()
                graph.replay()
                graphs.append(doubled)
    assert all(doubled.tolist() == [2.0] * 8 for doubled in graphs) and not told.failed
    assert assert_images_are_right(place, state, told) == list(range(1, PROBATION + 7))


def graphed(model: Network, optimizer: torch.optim.Optimizer) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    batch = torch.randn(64, model.width, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (model(batch) - batch).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, batch


@pytest.mark.parametrize("capture", ["eager", "fenced"])
def test_a_graph_that_was_recorded_before(place: Path, capture: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    state = {"model": model, "optimizer": optimizer}
    graph, batch = graphed(model, optimizer)

    def body(step: int) -> None:
        batch.normal_()
        graph.replay()

    told = train(place, state, body, capture=capture)
    assert not told.failed and assert_images_are_right(place, state, told) == list(range(1, 11))
    assert not owned(told)
    assert capture == "eager" or any("was not seen to step" in message for message in messages(told))


def test_a_graph_that_is_recorded_in_the_middle_of_a_fenced_training(place: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    state = {"model": model, "optimizer": optimizer}
    plain = step_of(model, optimizer)
    recorded: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []

    def body(step: int) -> None:
        if step < PROBATION + 3:
            plain(step)
        else:
            if not recorded:
                recorded.append(graphed(model, optimizer))
            recorded[0][1].normal_()
            recorded[0][0].replay()

    told = train(place, state, body, capture="fenced", steps=PROBATION + 8)
    assert not told.failed and assert_images_are_right(place, state, told) == list(range(1, PROBATION + 9))
    assert any("CUDA graph" in message for message in messages(told))
    assert not told.late.get(PROBATION + 6) and owned(told)


@pytest.mark.parametrize("whole", [False, True], ids=["the model", "the step"])
def test_compiled_and_fenced(place: Path, whole: bool) -> None:
    pytest.importorskip("triton", reason="torch.compile needs Triton for a CUDA device")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=whole, foreach=True)
    state = {"model": model, "optimizer": optimizer}
    compiled = torch.compile(model.forward)
    update = torch.compile(optimizer.step) if whole else optimizer.step

    def body(step: int) -> None:
        batch = torch.randn(64, model.width, device="cuda")
        optimizer.zero_grad()
        (compiled(batch) - batch).square().mean().backward()
        update()

    try:
        told = train(place, state, body, capture="fenced", steps=PROBATION + 5)
    except Exception as error:
        if "compiler" in str(error).lower() and "not" in str(error).lower():
            pytest.skip(f"the compiler does not work here: {error}"[:200])
        raise
    assert not told.failed and assert_images_are_right(place, state, told) == list(range(1, PROBATION + 6))
    assert bool(owned(told)) is not whole
    assert not whole or any("torch.compile" in message for message in messages(told))


# -- elsewhere, and what tensors there are -----------------------------------------------------------------------------


def trained(make: Make = OPTIMIZERS["AdamW fused"]) -> dict[str, Any]:
    model = network()
    optimizer = make(model.parameters())
    for step in range(3):
        step_of(model, optimizer)(step)
    return {"model": model, "optimizer": optimizer}


def twin(where: str) -> dict[str, Any]:
    """Another model and optimizer that have never stepped."""
    torch.manual_seed(99)
    model = Network().to(where)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.5)}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_to_the_host_and_back(make: Make, place: Path) -> None:
    if make is OPTIMIZERS["SGD"]:
        pytest.skip("its state is another one than AdamW's")
    there = trained(make)
    wanted = snapshot(there)
    tenuto.save(there, place)
    here = twin("cpu")
    tenuto.load(place, into=here)
    found = snapshot(here)
    assert all(not one.is_cuda for one in found.values())
    assert_same(found, wanted)
    tenuto.save(here, place.with_name("back"))
    again = twin("cuda")
    tenuto.load(place.with_name("back"), into=again)
    found = snapshot(again)
    assert all(found[path].is_cuda for path in found if path.startswith("/model") or "exp_avg" in path)
    assert_same(found, wanted)
    step_of(again["model"], again["optimizer"])(0)


def test_work_that_is_still_queued_does_not_overwrite_what_is_restored(place: Path) -> None:
    weight = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    tenuto.save({"weight": weight}, place)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        weight.fill_(-1.0)
        tenuto.load(place, into={"weight": weight})
        assert torch.equal(weight.cpu(), torch.arange(1 << 20, dtype=torch.float32))
        for _ in range(3):
            torch.full((1 << 20,), 7.0, device="cuda")  # leaves a block behind, with work queued for it
        torch.cuda._sleep(500_000_000)
        torch.full((1 << 20,), 7.0, device="cuda")
        fresh = tenuto.load(place, device="cuda").state["weight"]
        assert torch.equal(fresh.cpu(), torch.arange(1 << 20, dtype=torch.float32))


def test_into_a_model_on_the_device(place: Path) -> None:
    there = trained()
    wanted = snapshot(there)
    tenuto.save(there, place)
    again = twin("cuda")
    addresses = [one.data_ptr() for one in again["model"].parameters()]
    tenuto.load(place, into=again)
    assert_same(snapshot(again), wanted)
    assert addresses == [one.data_ptr() for one in again["model"].parameters()], "it is restored in place"


def test_fresh_tensors_lie_where_the_caller_says(place: Path) -> None:
    there = {"weight": torch.randn(300, 300, device="cuda"), "halves": torch.randn(77, device="cuda").bfloat16()}
    tenuto.save(there, place)
    for where in ("cuda", "cuda:0", torch.device("cuda", 0), "cpu"):
        found = tenuto.load(place, device=where).state
        assert all(one.device.type == torch.device(where).type for one in found.values())
        assert_same(found, there)
    assert all(one.device.type == "cpu" for one in tenuto.load(place).state.values())


def test_a_process_without_torch_reads_it(place: Path) -> None:
    weight = torch.arange(1000, dtype=torch.float32, device="cuda")
    tenuto.save({"weight": weight}, place)
    code = (
        "import sys, numpy, tenuto; found = tenuto.load(sys.argv[1]).state['weight']\n"
        "assert numpy.array_equal(numpy.asarray(found), numpy.arange(1000, dtype=numpy.float32))"
    )
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run(
        [sys.executable, "-c", code, str(place)], check=True, env=os.environ | {"PYTHONPATH": source}, timeout=120
    )


def kinds() -> dict[str, torch.Tensor]:
    cuda = {"device": "cuda"}
    found = {
        "transposed": torch.randn(130, 257, **cuda).t(),
        "strided": torch.randn(64, 300, **cuda)[:, ::3],
        "channels last": torch.randn(2, 8, 16, 16, **cuda).to(memory_format=torch.channels_last),
        "offset": torch.randn(1001, **cuda)[1:],
        "expanded": torch.randn(1, 50, **cuda).expand(20, 50),
        "complex": torch.randn(100, dtype=torch.complex64, **cuda),
        "complex128": torch.randn(100, dtype=torch.complex128, **cuda),
        "conjugate": torch.randn(40, 50, dtype=torch.complex64, **cuda).conj(),
        "conjugate transposed": torch.randn(40, 50, dtype=torch.complex64, **cuda).mH,
        "negative": torch.randn(64, dtype=torch.complex64, **cuda).conj().imag,
        "empty": torch.empty(0, 3, **cuda),
        "scalar": torch.tensor(3.25, **cuda),
        "bool": torch.rand(777, **cuda) > 0.5,
        "nan": torch.tensor([float("nan"), -0.0, float("inf")], **cuda),
        "float16": torch.randn(333, **cuda).half(),
        "bfloat16": torch.randn(333, **cuda).bfloat16(),
        "float64": torch.randn(333, **cuda).double(),
    }
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        found[str(kind)] = torch.randn(333, **cuda).to(kind)
    for kind in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        found[str(kind)] = torch.randint(0, 100, (333,), dtype=kind, **cuda)
    for kind in (torch.uint16, torch.uint32, torch.uint64):
        found[str(kind)] = torch.randint(0, 100, (334,), dtype=torch.uint8, **cuda)[: 333 // 8 * 8].view(kind)
    return found


@pytest.mark.parametrize("name", list(kinds()))
def test_every_kind_of_tensor(place: Path, name: str) -> None:
    tensor = kinds()[name]
    wanted = tensor.detach().clone()
    tenuto.save({"it": tensor, "beside": torch.ones(5, device="cuda")}, place)
    for where in ("cpu", "cuda"):
        assert same(tenuto.load(place, device=where).state["it"], wanted)
    if name != "expanded":  # many of its elements lie in one place
        into = {"it": tensor, "beside": torch.zeros(5, device="cuda")}
        if tensor.numel():
            (tensor.view(torch.uint8) if name.startswith("torch.") else tensor).zero_()
        tenuto.load(place, into=into)
        assert same(into["it"], wanted) and bool((into["beside"] == 1).all())


def test_all_kinds_at_once_asynchronously(place: Path) -> None:
    state: dict[str, Any] = dict(kinds())
    wanted = {name: one.detach().clone() for name, one in state.items()}
    with tenuto.Checkpointer(place, state) as ckpt:
        ckpt.step_done()
        save = ckpt.save()
        for name, one in state.items():
            if one.numel() and name != "expanded" and one.dtype in (torch.float32, torch.complex64, torch.bfloat16):
                one.zero_()
        save.wait()
    assert_same(tenuto.load(place).state, wanted)


def test_tied_tensors_stay_tied(place: Path) -> None:
    whole = torch.randn(64, 64, device="cuda")
    state = {"one": whole, "other": whole, "part": whole[8:16]}
    wanted = {name: one.clone() for name, one in state.items()}
    tenuto.save(state, place)
    whole.zero_()
    tenuto.load(place, into=state)
    assert_same(state, wanted)
    fresh = tenuto.load(place, device="cuda").state
    assert_same(fresh, wanted)
    assert fresh["one"].data_ptr() == fresh["other"].data_ptr()


def test_tied_weights_of_a_model_are_fenced_and_right(place: Path) -> None:
    class Tied(Network):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(512, 2048)
            self.again.weight = self.first.weight

    model = Tied().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    told = train(place, state, lambda step: optimizer.step(), capture="fenced")
    assert not told.failed and assert_images_are_right(place, state, told) == list(range(1, 11))
    assert model.again.weight is model.first.weight


# -- generators, certificates ------------------------------------------------------------------------------------------


def test_the_generators_of_all_devices_come_back(place: Path) -> None:
    devices = range(torch.cuda.device_count())
    for number in devices:
        torch.rand(5, device=f"cuda:{number}")
    with tenuto.Checkpointer(place, {"w": torch.zeros(3, device="cuda")}) as ckpt:
        ckpt.step_done()
        ckpt.save(wait=True)
        wanted = [torch.rand(100, device=f"cuda:{number}") for number in devices]
    torch.cuda.manual_seed_all(12345)
    with tenuto.Checkpointer(place, {"w": torch.ones(3, device="cuda")}) as ckpt:
        assert ckpt.restore() is not None
        for _ in ckpt.steps(2):
            found = [torch.rand(100, device=f"cuda:{number}") for number in devices]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_generator_of_ones_own_on_the_device(place: Path) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    torch.rand(7, device="cuda", generator=generator)
    tenuto.save({"noise": generator}, place)
    wanted = torch.rand(7, device="cuda", generator=generator)
    again = torch.Generator("cuda").manual_seed(4)
    tenuto.load(place, into={"noise": again})
    assert torch.equal(torch.rand(7, device="cuda", generator=again), wanted)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_certificate_tells_of_kernels_that_may_differ(place: Path, deterministic: bool) -> None:
    model = network(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    benchmark = torch.backends.cudnn.benchmark
    with mock.patch.dict(os.environ, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}):
        try:
            torch.use_deterministic_algorithms(deterministic, warn_only=False)
            torch.backends.cudnn.benchmark = not deterministic
            train(place, state, step_of(model, optimizer), steps=2)
        finally:
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.benchmark = benchmark
    certificate: Any = tenuto.load(place).certificate
    reasons = " ".join(certificate["reasons"])
    assert ("use_deterministic_algorithms is off" in reasons) is not deterministic
    assert ("cudnn.benchmark is on" in reasons) is not deterministic
    assert certificate["exact"] is deterministic, certificate


# -- memory ------------------------------------------------------------------------------------------------------------


def test_images_are_pinned_and_let_go(place: Path) -> None:
    gc.collect()
    before = dict(device._pinned)
    state = trained()
    with tenuto.Checkpointer(place, state, in_flight=2) as ckpt:
        for _ in range(3):
            ckpt.step_done()
            ckpt.save()
        ckpt.wait()
        new = device._pinned.keys() - before
        assert len(new) == 2, "an image of each save in flight"
        for begin, end in new:
            whole = torch.frombuffer((ctypes.c_uint8 * (end - begin)).from_address(begin), dtype=torch.uint8)
            assert whole[:4096].is_pinned() and whole[-1:].is_pinned()
            del whole
    del ckpt
    gc.collect()
    assert device._pinned == before


def test_memory_that_cannot_be_pinned_leaves_no_error_behind(place: Path) -> None:
    specs = [LeafSpec("a", "float32", (4096,))]
    memory = np.zeros(1 << 16, np.uint8)
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0
    try:
        bound = device.AcceleratorBound(specs, [memory[4096 : 4096 + 16384]], torch.device("cuda:0"))  # refused
        source = torch.randn(4096, device="cuda")  # a kernel: it raises what is left
        bound.copy([source], 0, 1)
        bound.wait()
        assert np.array_equal(memory[4096 : 4096 + 16384].view(np.float32), source.cpu().numpy())
        assert not [begin for begin, _ in device._pinned if begin == memory.ctypes.data]
    finally:
        runtime.cudaHostUnregister(memory.ctypes.data)


def test_two_that_copy_into_one_image_share_its_registration() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    begin = memory.ctypes.data
    specs = [LeafSpec("a", "uint8", (5000,))]
    source = torch.randint(0, 255, (5000,), dtype=torch.uint8, device="cuda")
    one = device.AcceleratorBound(specs, [memory[6000:11000]], torch.device("cuda:0"))
    other = device.AcceleratorBound(specs, [memory[1500:6500]], torch.device("cuda:0"))
    other.copy([source], 0, 1)
    other.wait()
    del one
    gc.collect()
    assert begin in {start for start, _ in device._pinned} and torch.from_numpy(memory).is_pinned()
    other.copy([source], 0, 1)
    other.wait()
    assert np.array_equal(memory[1500:6500], source.cpu().numpy())
    del other
    gc.collect()
    assert begin not in {start for start, _ in device._pinned} and not torch.from_numpy(memory).is_pinned()


def test_an_image_that_grows_is_pinned_anew(place: Path) -> None:
    """A Checkpointer is mostly made before the optimizer has a state."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    before = set(device._pinned)
    with tenuto.Checkpointer(place, state, keep=keep.all()) as ckpt:
        for number in range(1, 4):
            step_of(model, optimizer)(number)
            ckpt.step_done()
            ckpt.save().wait()
            new = [end - begin for begin, end in device._pinned.keys() - before]
            assert sum(new) >= sum(one.nbytes for one in snapshot(state).values() if one.is_cuda)
            again = twin("cuda")
            tenuto.load(place, into=again)
            assert_same(snapshot(again), snapshot(state))


@pytest.mark.parametrize("capture", ["eager", "fenced"])
def test_no_memory_of_the_device_is_kept(tmp_path: Path, capture: str) -> None:
    def once(number: int) -> None:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        state = {"model": model, "optimizer": optimizer}
        more: dict[str, Any] = {"save": every(steps=1), "capture": capture}
        with tenuto.Checkpointer(tmp_path / str(number), state, **more) as ckpt:
            for step in ckpt.steps(PROBATION + 3):
                step_of(model, optimizer)(step)

    def level() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    once(0)  # the libraries take their workspaces
    before = level()
    for number in range(1, 5):
        once(number)
    assert level() <= before


def test_a_fenced_save_takes_little_memory_of_the_device(place: Path) -> None:
    model = network(1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"model": model, "optimizer": optimizer}
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with tenuto.Checkpointer(place, state, save=every(steps=1), capture="fenced") as ckpt:
        for _ in ckpt.steps(PROBATION + 4):
            optimizer.step()
    assert torch.cuda.max_memory_allocated() - held < 4 * device.DEVICE_STEP + 64 * MIB


# -- whole processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["eager", "fenced"])
def test_killed_and_resumed_is_uninterrupted(tmp_path: Path, capture: str) -> None:
    whole = program(tmp_path, "train", capture, "whole", "20", "-1")
    program(tmp_path, "train", capture, "pieces", "20", "7", status=9)
    program(tmp_path, "train", capture, "pieces", "20", "13", status=9)
    last = program(tmp_path, "train", capture, "pieces", "20", "-1")
    assert last["began"] == 12 and whole["began"] == 0, "it goes on from the newest save"
    assert last["losses"] == whole["losses"][12:]
    assert last["digests"] == whole["digests"] and last["certificate"]["exact"] is True, last["certificate"]


@pytest.mark.parametrize("capture", ["eager", "fenced"])
def test_back_from_memory(tmp_path: Path, capture: str) -> None:
    whole = program(tmp_path, "memory", capture, "whole", "16", "-1")
    program(tmp_path, "memory", capture, "pieces", "16", "9", status=9)
    last = program(tmp_path, "memory", capture, "pieces", "16", "-1")
    assert last["source"].startswith("from memory, step ") and last["began"] >= 8
    assert last["losses"] == whole["losses"][last["began"] :] and last["digests"] == whole["digests"]


@pytest.mark.parametrize("capture", ["eager", "fenced"])
@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "dtensor"])
def test_a_rank_of_nccl(tmp_path: Path, kind: str, capture: str) -> None:
    pytest.importorskip("torch.distributed")
    if not torch.distributed.is_nccl_available():
        pytest.skip("torch has no NCCL here")
    found = program(tmp_path, "ranks", capture, kind)
    assert found["differing"] == [] and found["steps"] == found["committed"] and found["restored"] is True
    assert kind == "dtensor" or capture == "eager" or found["late"], "nothing was late"


@pytest.mark.parametrize("capture", ["eager", "fenced"])
@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "dtensor"])
def test_two_ranks_share_the_device(tmp_path: Path, kind: str, capture: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(program, tmp_path, "ranks", capture, kind, RANK=str(rank), WORLD_SIZE="2") for rank in (0, 1)
        ]
        found = [one.result() for one in running]
    for one in found:
        assert one["differing"] == [] and one["steps"] == one["committed"] and one["restored"] is True
    if kind == "dtensor":
        whole = torch.cat([torch.tensor(one["cut"]["/cut"]) for one in found])
        loaded = tenuto.load(tmp_path / kind, device="cuda").state["cut"]
        assert loaded.is_cuda and torch.equal(loaded.cpu(), whole), "by one process, without a job"


def test_a_forked_child_leaves_the_parents_memory_alone(place: Path) -> None:
    state = trained()
    with tenuto.Checkpointer(place, state, keep=keep.all()) as ckpt:
        ckpt.step_done()
        ckpt.save().wait()
        pinned = dict(device._pinned)
        gc.collect()  # torch aborts in a child that drops a tensor of the device
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        step_of(state["model"], state["optimizer"])(0)
        wanted = copy.deepcopy(snapshot(state))
        ckpt.step_done()
        ckpt.save().wait()
        assert device._pinned == pinned
    tenuto.load(place, into=state, step=2)
    assert committed(place) == [1, 2]
    assert_same(snapshot(state), wanted)
