"""`tenuto import` and `tenuto migrate`: what they make, and what a failure or a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import tenuto
from tenuto.errors import CorruptionError, SaveFailed
from tenuto.formats.contract import RawTensor

STEPS = (100, 200, 300)


def weights(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {
        "module.a.weight": random.standard_normal((64, 300)).astype(np.float32),
        "module.a.bias": random.standard_normal(64).astype(np.float32),
        "module.steps": np.array(step),
    }


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Checkpoints as a Trainer leaves them."""
    for step in STEPS:
        place = tmp_path / "out" / f"checkpoint-{step}"
        place.mkdir(parents=True)
        safetensors.numpy.save_file(weights(step), place / "model.safetensors")
        history = [{"step": step, "loss": 1 / step}]
        (place / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}))
        (place / "config.json").write_text('{"model_type": "x"}')
    return tmp_path / "out"


def holds(where: Path, step: int, *, prefix: str = "module.") -> bool:
    with tenuto.open(where, step=step) as opened:
        return all(
            np.array_equal(opened["model/" + name.replace("module.", prefix)].numpy(), array)
            for name, array in weights(step).items()
        )


def steps(where: Path, run: str = "main") -> list[int]:
    return [id.step for id in tenuto.Repository(where).checkpoints(run)]


def test_a_training_of_another_tool_becomes_a_run(cli, out, tmp_path):
    where = tmp_path / "ckpts"
    status, said, _ = cli("migrate", out, where, "--dry-run")
    assert status == 0 and "3 checkpoints" in said and said.endswith("nothing was written\n")
    assert not where.exists()
    found = json.loads(cli("migrate", out, where, "--json")[1])
    assert (found["schema"], [one["step"] for one in found["plan"]]) == ("tenuto.migrate/1", list(STEPS))
    assert [one["checkpoint"]["step"] for one in found["imported"]] == list(STEPS)
    assert steps(where) == [300, 200, 100] and all(holds(where, step) for step in STEPS)
    repo = tenuto.Repository(where)
    assert repo.metrics(repo.find(step=200)) == {"loss": 1 / 200}
    assert cli("verify", where)[0] == 0
    with tenuto.open(where) as opened:
        assert opened.plain("trainer_state/global_step") == 300
        assert opened.plain("hf_files/config.json") == b'{"model_type": "x"}'


def test_run_again_it_takes_what_is_new(cli, out, tmp_path):
    where = tmp_path / "ckpts"
    later = out / "checkpoint-300"
    later.rename(tmp_path / "later")
    assert cli("migrate", out, where)[0] == 0
    (tmp_path / "later").rename(later)
    status, said, err = cli("migrate", out, where)
    assert (status, said.startswith(f"{where}: 1 checkpoint (step 300 of run main)".replace(str(tmp_path), ""))) == (
        0,
        True,
    )
    assert err.count("was made from it before") == 2
    assert steps(where) == [300, 200, 100]
    assert cli("migrate", out, where)[1].startswith("nothing to do")
    status, _, err = cli("import", out / "checkpoint-100", where, "--strip", "module.", "--step", "250")
    assert (status, "is at step 300 already" in err, "--run OTHER" in err) == (2, True, True)


def test_names_and_element_types_are_changed_by_rules(cli, out, tmp_path):
    where, source = tmp_path / "ckpts", out / "checkpoint-200/model.safetensors"
    words = ("import", source, where, "--strip", "module.", "--rename", "^a=layer", "--dtype", "bf16", "--step", "7")
    status, said, _ = cli(*words, "--dry-run")
    assert "renamed: 3 names in each" in said and "module.a.bias -> layer.bias" in said
    assert "rounded to bfloat16: 2 tensors" in said
    assert cli(*words)[0] == 0
    with tenuto.open(where) as opened:
        assert set(opened) == {"model/layer.weight", "model/layer.bias", "model/steps"} and opened.step == 7
        assert {opened[path].dtype for path in opened} == {"bfloat16", "int64"}
    status, _, err = cli("import", source, where, "--rename", "nothing=x")
    assert (status, "meets no name" in err) == (2, True)


def test_imported_weights_load_into_a_model(cli, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    model, fresh = torch.nn.Linear(30, 20), torch.nn.Linear(30, 20)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert cli("import", tmp_path / "model.safetensors", tmp_path / "ckpts")[0] == 0
    tenuto.load(tmp_path / "ckpts", into=fresh)
    assert torch.equal(fresh.weight, model.weight)
    assert cli("export", tmp_path / "ckpts", tmp_path / "again.safetensors")[0] == 0
    assert safetensors.numpy.load_file(tmp_path / "again.safetensors").keys() == {"weight", "bias"}


def test_a_tree_of_files_can_be_saved_as_it_is(tmp_path):
    safetensors.numpy.save_file(weights(1), tmp_path / "x.safetensors")
    with tenuto.formats.read(tmp_path / "x.safetensors") as reader:
        tenuto.save({"model": reader.tree, "tied": reader.tree["module.steps"]}, tmp_path / "ckpts")
    assert holds(tmp_path / "ckpts", 0) is False
    with tenuto.open(tmp_path / "ckpts") as opened:
        assert np.array_equal(opened["model/module.a.weight"].numpy(), weights(1)["module.a.weight"])
        assert opened["tied"].numpy() == 1


def test_a_migration_into_memory_or_an_existing_repository(out, tmp_path):
    tenuto.save({"x": np.ones(3)}, tmp_path / "ckpts", run="other", step=5)
    report = tenuto.Repository.migrate(out, tmp_path / "ckpts", check="all")
    assert [one.id.step for one in report.imported] == list(STEPS)
    assert all(one.compared == sum(array.nbytes for array in weights(1).values()) for one in report.imported)
    assert steps(tmp_path / "ckpts", "other") == [5]
    place = f"memory://migrated-{os.getpid()}"
    assert len(tenuto.Repository.migrate(out, place).imported) == 3
    assert steps(place) == [300, 200, 100]


def test_damage_in_the_middle_leaves_nothing(cli, out, tmp_path, monkeypatch):
    """The file is whole when it is planned, and ends early when it is read."""
    where = tmp_path / "ckpts"
    read_into = RawTensor.read_into

    def cut(self, data, start=0):
        if "checkpoint-300" in str(self.file.path) and self.nbytes > 1000:
            os.truncate(self.file.path, 5000)
        read_into(self, data, start)

    monkeypatch.setattr(RawTensor, "read_into", cut)
    with pytest.raises(CorruptionError, match="checkpoint-300"):
        tenuto.Repository.migrate(out, where)
    monkeypatch.undo()
    assert steps(where) == [] and not list(where.rglob("*.safetensors"))
    status, _, err = cli("migrate", out, where)
    assert (status, "--skip-damaged" in err, steps(where)) == (2, True, [])
    assert cli("migrate", out, where, "--skip-damaged")[0] == 0
    assert steps(where) == [200, 100] and cli("verify", where)[0] == 0


def test_what_is_not_what_the_source_holds_never_becomes_visible(out, tmp_path, monkeypatch):
    """Something else is read the second time, as from a file that is written to meanwhile, or by a wrong reader."""
    times: dict[int, int] = {}
    read_into = RawTensor.read_into

    def other(self, data, start=0):
        read_into(self, data, start)
        times[self.offset] = times.get(self.offset, 0) + 1
        if times[self.offset] > 1 and "checkpoint-200" in str(self.file.path):
            data[0] ^= 1

    monkeypatch.setattr(RawTensor, "read_into", other)
    with pytest.raises(SaveFailed, match="is not what its source holds"):
        tenuto.Repository.migrate(out, tmp_path / "ckpts")
    assert steps(tmp_path / "ckpts") == []


KILLED = """
import os, signal, sys
import tenuto
from tenuto.crashpoints import armed

source, where, name, times = sys.argv[1:5]
left = int(times)

def kill():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

with armed(name, kill):
    tenuto.Repository.migrate(source, where)
"""


@pytest.mark.parametrize(
    ("point", "times", "visible"),
    [
        ("pack durable, index not yet", 2, []),
        ("packs and indexes durable, manifest not yet", 3, []),
        ("migrated checkpoints durable, none visible", 1, []),
        ("a migrated checkpoint is visible", 2, [200, 100]),
    ],
)
def test_killed_at_any_point_it_leaves_whole_checkpoints_or_none(cli, out, tmp_path, point, times, visible):
    where = tmp_path / "ckpts"
    words = [sys.executable, "-c", KILLED, str(out), str(where), point, str(times)]
    assert subprocess.run(words, timeout=120, check=False).returncode == -signal.SIGKILL
    assert steps(where) == visible
    if visible:
        assert cli("verify", where)[0] == 0 and all(holds(where, step) for step in visible)
    assert cli("migrate", out, where)[0] == 0  # it goes on, and frees what the killed one has left
    assert steps(where) == [300, 200, 100] and all(holds(where, step) for step in STEPS)
    packs = {path.parent for path in where.rglob("*.safetensors")}
    assert len(packs) == 3
    assert cli("verify", where)[0] == 0


def test_no_more_than_a_few_blocks_are_held_of_a_large_tensor(tmp_path, monkeypatch):
    source = tmp_path / "x.npz"
    np.savez(source, w=np.zeros((64, 1 << 18), np.float32))  # 64 MiB
    longest = 0
    read_into = RawTensor.read_into

    def measured(self, data, start=0):
        nonlocal longest
        longest = max(longest, len(data))
        read_into(self, data, start)

    monkeypatch.setattr(RawTensor, "read_into", measured)
    tenuto.Repository.migrate(source, tmp_path / "ckpts", check="all")
    assert 0 < longest <= 16 << 20
    tenuto.Repository(tmp_path / "ckpts").export(tmp_path / "again.npz")
    with np.load(tmp_path / "again.npz") as found:
        assert found["w"].shape == (64, 1 << 18)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("import", "out", "ckpts"), "has 3 checkpoints"),
        (("migrate", "nowhere", "ckpts"), "is not there"),
        (("migrate", "out", "ckpts", "--from", "npz"), "is not of the format npz"),
        (("migrate", "out", "ckpts", "--from", "nzp"), "there is no format 'nzp'"),
        (("import", "out/checkpoint-100/config.json", "ckpts"), "not a checkpoint of a known format"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_hint(cli, out, monkeypatch, words, said):
    monkeypatch.chdir(out.parent)
    status, _, err = cli(*words)
    assert status in (2, 18) and said in err and "hint: " in err
    assert not Path("ckpts").exists()


class Files:
    """The files of a model as an adapter of a trainer saves them."""

    def state_dict(self):
        return {"config.json": b'{"model_type": "x"}', "tokenizer.json": b"x" * 100_000}

    def load_state_dict(self, state):
        raise AssertionError("nothing is restored here")


def test_a_directory_for_from_pretrained_has_the_models_files(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    where, out = tmp_path / "ckpts", tmp_path / "model"
    tenuto.save({"model": {"w": np.ones(3, np.float32)}, "hf_files": Files()}, where)
    status, _, err = cli("export", where, out, "--to", "hf")
    assert (status, err) == (0, "note: from_pretrained was not tried: transformers is not installed\n")
    assert {path.name for path in out.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (out / "tokenizer.json").read_bytes() == b"x" * 100_000
    assert cli("export", where, out, "--to", "hf")[0] == 2
    assert cli("export", where, out, "--to", "hf", "--force")[0] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("")
    status, _, err = cli("export", where, tmp_path / "mine", "--to", "hf", "--force")
    assert (status, "other things in it" in err, (tmp_path / "mine/thesis.tex").exists()) == (2, True, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpts", "mine", "model"]


@pytest.mark.parametrize("other", ["checkpoint-5/model.safetensors", "train.py", "tenuto.json"])
def test_a_models_directory_with_anything_else_in_it_is_not_replaced(cli, tmp_path, other):
    where, out = tmp_path / "ckpts", tmp_path / "model"
    tenuto.save({"model": {"w": np.ones(3, np.float32)}, "hf_files": Files()}, where)
    assert cli("export", where, out, "--to", "hf")[0] == 0
    (out / other).parent.mkdir(exist_ok=True)
    (out / other).write_bytes(b"mine")
    status, _, err = cli("export", where, out, "--to", "hf", "--force")
    assert (status, other.partition("/")[0] in err, (out / other).read_bytes()) == (2, True, b"mine")
