"""Encoded saves as a training meets them: what is written, and that every bit comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tenuto
from support.rank_threads import together
from tenuto import Encoding, every, keep
from tenuto.errors import CorruptionError, UsageError
from tenuto.maintenance.verify import assert_whole
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store
from tenuto.training import exit_status

MIB = 1 << 20
ENCODINGS = {
    "dedupe": "dedupe",
    "small": "small",
    "auto": "auto",
    "zstd alone": Encoding(dedupe=False),
    "lz4": Encoding(codec="lz4", workers=1),
    "short chains": Encoding(delta=2),
}


@pytest.fixture(autouse=True)
def _failures_on_purpose_do_not_end_the_test_run() -> Iterator[None]:
    yield
    exit_status._ending.failures.clear()


class Net:
    """Tensors of many kinds, of which a step changes some: all, few words, one row, none."""

    def __init__(self, seed: int = 0) -> None:
        source = torch.Generator().manual_seed(seed)
        self.state: dict[str, Any] = {
            "weights": torch.randn(400, 500, generator=source),
            "half": torch.randn(300, 700, generator=source).bfloat16(),
            "frozen": torch.randn(512, 512, generator=source),
            "rows": torch.randn(5000, 32, generator=source, dtype=torch.float64),
            "zeros": torch.zeros(300_000),
            "odd": torch.arange(7, dtype=torch.uint8),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3.5),
            "nans": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45] * 50_000),
            "small": {str(number): torch.full((number + 1,), float(number)) for number in range(40)},
            "array": np.arange(100_000, dtype=np.int16),
        }
        self.state["twin"] = self.state["frozen"].clone()

    def step(self, number: int) -> None:
        source = torch.Generator().manual_seed(number)
        self.state["weights"] -= 1e-3 * torch.randn(400, 500, generator=source)
        self.state["half"] += (1e-3 * torch.randn(300, 700, generator=source)).bfloat16()
        self.state["rows"][number % 5000] += 1
        self.state["nans"][number] = number
        self.state["small"]["3"] += 1

    def copy(self) -> dict[str, bytes]:
        return bits(self.state)


def bits(state: Mapping[str, Any], before: str = "") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            found |= bits(value, f"{before}{name}/")
        else:
            array = value.contiguous().view(-1).view(torch.uint8).numpy() if isinstance(value, torch.Tensor) else value
            found[before + name] = np.asarray(array).tobytes()
    return found


def train(where: Any, net: Net, steps: int, **settings: Any) -> dict[int, dict[str, bytes]]:
    seen: dict[int, dict[str, bytes]] = {}
    arguments = {"save": every(steps=1), "keep": keep.all(), "on_error": "raise", **settings}
    with tenuto.Checkpointer(where, net.state, **arguments) as ckpt:
        for step in ckpt.steps(steps):
            net.step(step)
            seen[step + 1] = net.copy()
    return seen


def written(where: Path, step: int, attempt: int = 1) -> int:
    """Returns the bytes of the packs in a checkpoint's directory."""
    found = (where / f"runs/main/a{attempt:04d}/step-{step:08d}").glob("rank-*")
    return sum(path.stat().st_size for path in found if path.suffix in (".pack", ".safetensors"))


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
def test_every_bit_of_every_step_comes_back(tmp_path: Path, encoding: Any) -> None:
    seen = train(tmp_path, Net(), 6, encoding=encoding)
    for step, expected in seen.items():
        assert bits(tenuto.load(tmp_path, step=step).state) == expected, step
    into = Net(seed=9).state
    tenuto.load(tmp_path, into=into, step=4)
    assert bits(into) == seen[4]
    assert_whole(Repo.open(open_store(tmp_path)))


@pytest.mark.parametrize("encoding", ["dedupe", "small"])
def test_slices_are_read_without_the_rest(tmp_path: Path, encoding: Any) -> None:
    net = Net()
    train(tmp_path, net, 3, encoding=encoding)
    with tenuto.open(tmp_path, step=3) as opened:
        assert torch.equal(opened["weights"][17:19, ::3], net.state["weights"][17:19, ::3])
        assert torch.equal(opened["rows"][4998:], net.state["rows"][4998:])
        assert np.array_equal(opened["array"][::-7], net.state["array"][::-7])


def test_a_save_of_unchanged_state_writes_no_data_file(tmp_path: Path) -> None:
    net = Net()
    with tenuto.Checkpointer(tmp_path, net.state, save=every(steps=1), keep=keep.all(), encoding="dedupe") as ckpt:
        for _ in ckpt.steps(3):
            pass
    assert written(tmp_path, 1) > 4 * MIB
    # Beside it there are the random generators, which are saved with the state, and have not changed either.
    assert written(tmp_path, 2) == written(tmp_path, 3) == 0
    assert bits(tenuto.load(tmp_path).state) == net.copy()


def test_only_what_has_changed_is_written(tmp_path: Path) -> None:
    """Of `rows`, `nans` and the small ones single chunks have changed, of `frozen`, `zeros` and `array` nothing."""
    train(tmp_path, Net(), 2, encoding="dedupe")
    changed = 400 * 500 * 4 + 300 * 700 * 2
    chunks = 3 * (256 << 10)
    assert changed < written(tmp_path, 2) <= 1.02 * (changed + chunks) + 8192
    twice = 512 * 512 * 4  # `twin` has the bytes of `frozen`
    total = sum(len(value) for value in Net().copy().values())
    assert written(tmp_path, 1) <= 1.01 * (total - twice) + 8192


def test_what_moved_to_another_name_is_found_by_its_digest(tmp_path: Path) -> None:
    state: dict[str, Any] = {"one": torch.randn(600_000), "other": torch.randn(300_000)}
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1), keep=keep.all(), encoding="dedupe") as ckpt:
        for step in ckpt.steps(2):
            if step == 1:
                state["deeper"] = {"moved": state.pop("one").clone()}
    assert written(tmp_path, 1) > 3 * MIB
    assert written(tmp_path, 2) == 0
    assert bits(tenuto.load(tmp_path, step=2).state) == bits(state)


def test_a_training_that_starts_afresh_rests_on_nothing(tmp_path: Path) -> None:
    """It restores nothing, and what it left behind may go at any time."""
    first = Net()
    train(tmp_path, first, 1, encoding="dedupe")
    with tenuto.Checkpointer(
        tmp_path, first.state, resume_from=None, save=every(steps=1), keep=keep.all(), encoding="dedupe"
    ) as ckpt:
        for _ in ckpt.steps(1):
            pass
    repo = Repo.open(open_store(tmp_path))
    assert repo.manifest(CheckpointId("main", 2, 1)).bases == ()
    assert written(tmp_path, 1, attempt=2) >= 0.99 * written(tmp_path, 1)


def test_a_resumed_run_rests_on_the_checkpoint_that_it_came_from(tmp_path: Path) -> None:
    net = Net()
    train(tmp_path, net, 2, encoding="small")
    again = Net(seed=5)
    seen = train(tmp_path, again, 4, encoding="small")
    assert sorted(seen) == [3, 4]
    assert written(tmp_path, 3, attempt=2) < 0.5 * written(tmp_path, 1)
    for step, expected in seen.items():
        assert bits(tenuto.load(tmp_path, step=step).state) == expected


def test_a_plain_checkpoint_is_a_baseline_too(tmp_path: Path) -> None:
    net = Net()
    train(tmp_path, net, 1)
    seen = train(tmp_path, Net(), 2, encoding="dedupe")
    assert written(tmp_path, 2, attempt=2) < 0.5 * written(tmp_path, 1)
    assert bits(tenuto.load(tmp_path, step=2).state) == seen[2]


def test_chains_of_differences_end(tmp_path: Path) -> None:
    train(tmp_path, Net(), 9, encoding=Encoding(delta=3))
    repo = Repo.open(open_store(tmp_path))
    longest = 0
    for step in range(1, 10):
        stored = repo.index(repo.manifest(CheckpointId("main", 1, step))).stored
        assert stored is not None
        depth, at = 0, np.flatnonzero(stored.base >= 0)
        while len(at):
            depth, below = depth + 1, stored.base[at]
            at = below[stored.base[below] >= 0]
        longest = max(longest, depth)
    assert longest == 3


def test_a_data_file_that_is_mostly_not_needed_is_named_no_more(tmp_path: Path) -> None:
    """Else one chunk that never changes would keep all that was written beside it."""
    state = {"00": torch.randn(70_000), **{str(number): torch.randn(70_000) for number in range(30)}}
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1), keep=keep.all(), encoding="dedupe") as ckpt:
        for _ in ckpt.steps(4):
            for number in range(30):
                state[str(number)] += 1
    repo = Repo.open(open_store(tmp_path))
    bases = [[base.step for base in repo.manifest(CheckpointId("main", 1, step)).bases] for step in range(1, 5)]
    assert bases[1] == [1]
    assert 1 not in bases[3]
    assert bits(tenuto.load(tmp_path).state) == bits(state)


@pytest.mark.parametrize("encoding", ["dedupe", "small"])
@pytest.mark.parametrize(
    "settings", [{"in_flight": 2}, {"memory_budget": 8 * MIB}, {"memory": every(steps=1)}], ids=str
)
def test_however_a_save_is_taken(tmp_path: Path, encoding: Any, settings: Any) -> None:
    seen = train(tmp_path, Net(), 5, encoding=encoding, **settings)
    for step, expected in seen.items():
        assert bits(tenuto.load(tmp_path, step=step).state) == expected


def test_two_ranks_save_what_they_hold_and_another_number_restores_it(tmp_path: Path) -> None:
    whole = np.random.default_rng(3).random((4096, 64)).astype(np.float32)

    def work(ranks: Any) -> None:
        begin = 2048 * ranks.rank
        held = whole[begin : begin + 2048].copy()
        frozen = np.random.default_rng(1).random(300_000)
        state = {"w": tenuto.shard(held, whole=whole.shape, offsets=(begin, 0)), "frozen": frozen}
        with tenuto.Checkpointer(
            tmp_path, state, save=every(steps=1), keep=keep.all(), on_error="raise", ranks=ranks, encoding="small"
        ) as ckpt:
            for _ in ckpt.steps(3):
                held *= np.float32(1.0001)

    for one in together(2, work):
        if isinstance(one, BaseException):
            raise one
    expected = whole
    for step in (1, 2, 3):
        expected = expected * np.float32(1.0001)
        state = tenuto.load(tmp_path, step=step).state
        assert np.array_equal(state["w"], expected)
        assert np.array_equal(state["frozen"], np.random.default_rng(1).random(300_000))
    assert written(tmp_path, 3) < 0.8 * written(tmp_path, 1)
    assert_whole(Repo.open(open_store(tmp_path)))

    def resumed(ranks: Any) -> bool:
        begin, end = (4096 * one // 3 for one in (ranks.rank, ranks.rank + 1))
        held = np.zeros_like(whole[begin:end])
        state = {"w": tenuto.shard(held, whole=whole.shape, offsets=(begin, 0)), "frozen": np.zeros(300_000)}
        with tenuto.Checkpointer(tmp_path, state, ranks=ranks, keep=keep.all(), encoding="small") as ckpt:
            ckpt.restore()
            return bool(np.array_equal(held, expected[begin:end]))

    assert together(3, resumed) == [True] * 3


@pytest.mark.parametrize("encoding", ["dedupe", "small"])
def test_a_damaged_data_file_is_told_and_an_older_checkpoint_taken(tmp_path: Path, encoding: Any) -> None:
    seen = train(tmp_path, Net(), 3, encoding=encoding)
    newest = sorted((tmp_path / "runs/main/a0001/step-00000003").glob("*.pack"))[-1]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"is damaged: .*step-00000003/rank-00000\.pack"):
        tenuto.load(tmp_path, step=3)
    older = tenuto.load(tmp_path)
    assert older.step == 2
    assert bits(older.state) == seen[2]


def test_damage_of_a_base_reaches_all_that_rest_on_it(tmp_path: Path) -> None:
    train(tmp_path, Net(), 3, encoding="dedupe")
    base = tmp_path / "runs/main/a0001/step-00000001/rank-00000.pack"
    data = bytearray(base.read_bytes())
    data[-100] ^= 1
    base.write_bytes(data)
    for step in (1, 2, 3):
        with pytest.raises(CorruptionError, match=r"step-00000001/rank-00000\.pack"):
            tenuto.load(tmp_path, step=step)


@pytest.mark.parametrize(
    ("value", "words"),
    [("tiny", "encoding='tiny' is not an encoding"), (3, "encoding=3")],
)
def test_an_encoding_that_does_not_exist(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tenuto.Checkpointer(tmp_path, {"x": torch.ones(3)}, encoding=value)


@pytest.mark.parametrize(
    "arguments", [{"codec": "gzip"}, {"level": 99}, {"delta": -1}, {"workers": 0}, {"delta": 3, "codec": None}], ids=str
)
def test_settings_that_make_no_sense(arguments: Any) -> None:
    with pytest.raises(UsageError, match="is not possible"):
        Encoding(**arguments)
