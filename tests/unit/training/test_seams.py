"""What a trainer's adapter is built from: a look ahead of the restore, entries that come late, a failure that is
reported, epochs that somebody else counts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tenuto
from tenuto import every, keep, on
from tenuto.errors import StateMismatch, UsageError
from tenuto.model.ids import CheckpointId
from tenuto.repo.repository import Repo
from tenuto.store.registry import open_store
from tenuto.torch import resumable


def model_of(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def trained(where: Path, steps: int = 3, **options: Any) -> dict[str, Any]:
    """Trains a little in a loop of its own, and returns the state."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "trainer": {"best": 0.5}}
    with tenuto.Checkpointer(where, state, save=every(steps=1), keep=keep.all(), **options) as ckpt:
        ckpt.restore()
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            state["trainer"]["best"] += 1
            ckpt.step_done()
    return state


def weights(state: dict[str, Any]) -> list[list[float]]:
    return [value.flatten().tolist() for value in state["model"].state_dict().values()]


# -- a look ahead


def test_a_peek_shows_the_checkpoint_that_the_restore_takes(tmp_path: Path) -> None:
    saved = trained(tmp_path)
    state = {"model": model_of(1), "optimizer": None, "trainer": {"best": 0.0}}
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
    before = weights(state)
    with tenuto.Checkpointer(tmp_path, state) as ckpt:
        opened = ckpt.peek()
        assert opened is not None
        assert (opened.step, opened.plain("trainer")) == (3, {"best": 3.5})
        assert opened["model/weight"].torch().tolist() == saved["model"].weight.tolist()
        assert weights(state) == before, "nothing is touched"
        restored = ckpt.restore()
        assert restored is not None
        assert restored.checkpoint.id == opened.id
    assert weights(state) == weights(saved)


def test_a_peek_passes_over_what_is_damaged_in_its_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path)
    pack = max(tmp_path.rglob("*.safetensors"), key=lambda path: str(path))
    data = bytearray(pack.read_bytes())
    data[-8] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(bytes(data))
    state = {"model": model_of(1), "optimizer": tenuto.late(), "trainer": {"best": 0.0}}
    with tenuto.Checkpointer(tmp_path, state) as ckpt:
        opened = ckpt.peek()
        assert opened is not None
        assert opened.step == 2
        assert [id.step for id, _ in opened.skipped] == [3]
        restored = ckpt.restore()
        assert restored is not None
        assert restored.step == 2
        assert [id.step for id, _ in restored.skipped] == [3]
    assert "was passed over for step 2" in caplog.text


def test_a_peek_at_a_new_run_shows_nothing_and_comes_before_the_restore(tmp_path: Path) -> None:
    with tenuto.Checkpointer(tmp_path, {"n": 1}) as ckpt:
        assert ckpt.peek() is None
        assert ckpt.restore() is None
        with pytest.raises(UsageError, match="restored already"):
            ckpt.peek()


@pytest.mark.parametrize("start", ["latest", 2])
def test_a_restore_after_a_peek_takes_that_one_though_a_newer_one_came(tmp_path: Path, start: Any) -> None:
    trained(tmp_path)
    state = {"model": model_of(1), "trainer": {}}
    with tenuto.Checkpointer(tmp_path, state, resume_from=start) as ckpt:
        opened = ckpt.peek()
        assert opened is not None
        trained(tmp_path, 2)
        restored = ckpt.restore()
        assert restored is not None
        assert restored.checkpoint.id == opened.id


def test_a_peek_sees_an_image_in_memory(tmp_path: Path) -> None:
    state: dict[str, Any] = {"weights": torch.zeros(1000), "n": 0}
    ckpt = tenuto.Checkpointer(tmp_path, state, save=every(steps=2), memory=every(steps=1))
    ckpt.restore()
    for step in (1, 2, 3):
        state["weights"] += 1
        state["n"] = step
        ckpt.step_done()
    ckpt.close(failed=KeyboardInterrupt())
    again: dict[str, Any] = {"weights": torch.zeros(1000), "n": 0}
    with tenuto.Checkpointer(tmp_path, again, memory=every(steps=1)) as ckpt:
        opened = ckpt.peek()
        assert opened is not None
        assert (opened.step, opened.plain("n"), again["n"]) == (3, 3, 0)
        assert opened["weights"].torch()[0] == 3
        restored = ckpt.restore()
        assert restored is not None
        assert restored.memory_s is not None
        assert (restored.step, again["n"], again["weights"][0]) == (3, 3, 3)
        ckpt.step_done()


# -- entries that come late


def test_a_late_entry_is_filled_by_a_second_restore(tmp_path: Path) -> None:
    saved = trained(tmp_path)
    state: dict[str, Any] = {"model": model_of(1), "optimizer": tenuto.late(), "trainer": tenuto.late()}
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1), keep=keep.all()) as ckpt:
        restored = ckpt.restore()
        assert restored is not None
        assert weights(state) == weights(saved)
        state["optimizer"] = optimizer = torch.optim.AdamW(state["model"].parameters())
        state["trainer"] = {"best": 0.0}
        torch.rand(7)  # whoever makes objects may draw
        again = ckpt.restore()
        assert again is not None
        assert "optimizer/state/model/weight/exp_avg" in again.report.created
        assert state["trainer"] == {"best": 3.5}
        assert optimizer.state_dict()["state"][0]["step"] == 3
        drawn = torch.rand(3).tolist()
        ckpt.step_done()
    twin = tenuto.Checkpointer(tmp_path, {"model": model_of(1)}, resume_from=3)
    twin.restore()
    assert torch.rand(3).tolist() == drawn
    twin.close()
    assert set(tenuto.load(tmp_path).state) == {"model", "optimizer", "trainer"}


def test_counting_is_refused_while_an_entry_is_late_that_the_checkpoint_has(tmp_path: Path) -> None:
    trained(tmp_path)
    state: dict[str, Any] = {"model": model_of(1), "optimizer": tenuto.late(), "trainer": {}}
    with tenuto.Checkpointer(tmp_path, state) as ckpt:
        ckpt.restore()
        with pytest.raises(UsageError, match="'optimizer' of the state is still late") as caught:
            ckpt.step_done()
        assert "ckpt.restore() once more" in str(caught.value)
        state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
        with pytest.raises(UsageError, match="took its place is not restored"):
            ckpt.save()
        ckpt.restore()
        ckpt.step_done()
        assert ckpt.step == 4


def test_steps_fills_what_has_come_since_the_restore(tmp_path: Path) -> None:
    trained(tmp_path)
    state: dict[str, Any] = {"model": model_of(1), "optimizer": tenuto.late(), "trainer": {}}
    with tenuto.Checkpointer(tmp_path, state) as ckpt:
        ckpt.restore()
        state["optimizer"] = torch.optim.AdamW(state["model"].parameters())
        for _ in ckpt.steps(4):
            assert state["optimizer"].state_dict()["state"][0]["step"] == 3


def test_what_is_late_in_a_new_run_is_left_out_of_its_saves(tmp_path: Path) -> None:
    state: dict[str, Any] = {"n": 1, "scaler": tenuto.late()}
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1)) as ckpt:
        ckpt.restore()
        ckpt.step_done()
        ckpt.wait()
        assert set(tenuto.load(tmp_path).state) == {"n"}
        certificate = Repo.open(open_store(tmp_path)).manifest(CheckpointId("main", 1, 1)).certificate
        assert certificate is not None
        assert "scaler" not in certificate["covers"]
        assert any("'scaler' is still tenuto.late()" in reason for reason in certificate["reasons"])
        state["scaler"] = {"scale": 2.0}
        ckpt.step_done()
        ckpt.wait()
        assert tenuto.load(tmp_path).state == {"n": 1, "scaler": {"scale": 2.0}}


def test_an_entry_that_came_late_and_does_not_fit_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    state: dict[str, Any] = {"model": tenuto.late(), "trainer": {}}
    with tenuto.Checkpointer(tmp_path, state) as ckpt:
        ckpt.restore()
        state["model"] = nn.Linear(4, 2)
        with pytest.raises(StateMismatch, match="model/weight"):
            ckpt.restore()


def test_late_stands_for_entries_of_the_state_alone(tmp_path: Path) -> None:
    with pytest.raises(tenuto.errors.Unserialisable, match="trainer/loss") as caught:
        tenuto.Checkpointer(tmp_path, {"trainer": {"loss": tenuto.late()}})
    assert "an entry of the state itself" in str(caught.value)


def test_prepare_plans_what_came_late(tmp_path: Path) -> None:
    state: dict[str, Any] = {"weights": tenuto.late()}
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1)) as ckpt:
        assert ckpt.prewarm_s == 0
        ckpt.restore()
        state["weights"] = torch.zeros(1 << 20)
        ckpt.prepare()
        assert ckpt.prewarm_s > 0
        ckpt.step_done()


def test_a_fence_knows_an_optimizer_that_came_late(tmp_path: Path) -> None:
    model = model_of()
    state: dict[str, Any] = {"model": model, "optimizer": tenuto.late()}
    with tenuto.Checkpointer(tmp_path, state, save=every(steps=1), capture="fenced") as ckpt:
        ckpt.restore()
        state["optimizer"] = optimizer = torch.optim.SGD(model.parameters())
        ckpt.prepare()
        for _ in range(3):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            ckpt.step_done()
        fencing = ckpt._training.saving.saver.fencing  # type: ignore[union-attr]
        assert fencing is not None


# -- the end, and the count of others


def test_a_failure_that_is_reported_saves_nothing_new(tmp_path: Path) -> None:
    ckpt = tenuto.Checkpointer(tmp_path, {"n": 1}, save=every(steps=2) | on.end())
    ckpt.restore()
    for _ in range(3):
        ckpt.step_done()
    ckpt.close(failed=ValueError("a trainer's hook says so"))
    assert tenuto.load(tmp_path).step == 2


def test_epochs_of_a_foreign_loop_are_saved_at_their_ends(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tenuto.Checkpointer(tmp_path, {"n": 1}, save=every(epochs=1), keep=keep.all()) as ckpt:
            ckpt.restore()
            for step in range(1, 7):
                ckpt.step_done(step, epoch_ended=step % 3 == 0, loss=None if step == 2 else 0.5)
                assert ckpt.epoch == step // 3
    assert [one.step for one in tenuto.Repository(tmp_path).checkpoints()] == [6, 3]


def test_an_epoch_may_be_numbered_by_the_trainer(tmp_path: Path) -> None:
    with tenuto.Checkpointer(tmp_path, {"n": 1}, save=every(epochs=2), keep=keep.all()) as ckpt:
        ckpt.restore()
        ckpt.step_done(1, epoch=3, epoch_ended=True)
        ckpt.step_done(2, epoch=4, epoch_ended=True)
        with pytest.raises(UsageError, match="epoch 3 is below"):
            ckpt.step_done(3, epoch=3, epoch_ended=False)
    assert [one.step for one in tenuto.Repository(tmp_path).checkpoints()] == [2]


# -- loaders that count


def loader_of(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10)), batch_size=2, shuffle=True, **options)


def test_a_resumable_loader_gives_what_the_loader_gives() -> None:
    plain = loader_of()
    torch.manual_seed(1)
    wanted = [[one[0].tolist() for one in plain] for _ in range(3)]
    counting = resumable(plain)
    torch.manual_seed(1)
    assert [[one[0].tolist() for one in counting] for _ in range(3)] == wanted
    assert isinstance(counting, DataLoader)
    assert len(counting) == 5
    assert resumable(counting) is counting


def test_a_foreign_loop_resumes_inside_an_epoch(tmp_path: Path) -> None:
    def run(until: int, where: Path, loaders: list[Any]) -> list[Any]:
        torch.manual_seed(3)
        loader = resumable(loader_of())
        loaders.append(loader)
        seen: list[Any] = []
        with tenuto.Checkpointer(where, {"n": 1}, data=loader, save=every(steps=1)) as ckpt:
            ckpt.restore()
            torch.rand(5)
            ckpt.restore_random_state()
            while ckpt.step < until:
                for batch in loader:
                    seen.append((batch[0].tolist(), torch.rand(1).item()))
                    ckpt.step_done(loss=None)
                    if ckpt.step == until:
                        break
        return seen

    made: list[Any] = []
    whole = run(13, tmp_path / "whole", made)
    parts = [*run(3, tmp_path / "parts", made), *run(5, tmp_path / "parts", made), *run(13, tmp_path / "parts", made)]
    assert parts == whole
    certificate = tenuto.open(tmp_path / "parts").certificate
    assert certificate["exact"]
    assert "position in the data" in certificate["covers"]
    assert tenuto.open(tmp_path / "parts").progress["batch"] == 3


def test_a_resumable_loader_that_nobody_iterates_is_not_believed(tmp_path: Path) -> None:
    plain = loader_of()
    with (
        pytest.warns(tenuto.TenutoWarning, match="not taken from ckpt.batches"),
        tenuto.Checkpointer(tmp_path, {"n": 1}, data=resumable(plain), save=every(steps=1)) as ckpt,
    ):
        ckpt.restore()
        for _ in plain:
            ckpt.step_done()
    certificate = tenuto.open(tmp_path).certificate
    assert not certificate["exact"]
    assert certificate["verdict"] == "not exact"


def test_only_a_loader_is_made_resumable() -> None:
    with pytest.raises(UsageError, match="takes a DataLoader"):
        resumable([1, 2])  # type: ignore[type-var]
