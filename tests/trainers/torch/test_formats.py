"""Files in formats of other packages, read by these packages, and the reverse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tenuto

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")


def tenuto_command(*words: object) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "tenuto", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_gguf_package_reads_what_is_exported(tmp_path: Path, dtype: str) -> None:
    state = {"a": torch.randn(3, 50), "b": torch.randn(7), "c": torch.tensor(2.5)}
    tenuto.save({"model": state}, tmp_path / "ckpts")
    tenuto.Repository(tmp_path / "ckpts").export(tmp_path / "x.gguf", dtype=dtype)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert {tensor.name for tensor in reader.tensors} == set(state)
    for tensor in reader.tensors:
        wanted = state[tensor.name].to(getattr(torch, dtype))
        found = torch.from_numpy(np.array(tensor.data)).reshape(-1).view(torch.uint8)
        assert torch.equal(found, wanted.reshape(-1).view(torch.uint8))
        assert tensor.shape.tolist() == (list(wanted.shape[::-1]) or [1])


def small_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("shard_size", ["1GB", "50KB"])
def test_a_pretrained_model_comes_in_and_goes_out_again(tmp_path: Path, shard_size: str) -> None:
    model, words = small_model(), torch.arange(20)[None]
    model.save_pretrained(tmp_path / "model", max_shard_size=shard_size)
    tenuto_command("import", tmp_path / "model", tmp_path / "ckpts")
    tenuto_command("export", tmp_path / "ckpts", tmp_path / "again", "--to", "hf")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(again(words).logits, model(words).logits)


def test_a_trainers_checkpoints_become_a_run(tmp_path: Path) -> None:
    model = small_model()
    data = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, save_steps=2, logging_steps=1, report_to=[], use_cpu=True
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    report = tenuto.Repository.migrate(tmp_path / "out", tmp_path / "ckpts", check="all")
    assert [one.id.step for one in report.imported] == [2, 4]
    assert "loss" in report.plan.checkpoints[1].metrics
    assert any("training_args.bin" in remark for remark in report.plan.checkpoints[0].remarks)
    fresh = small_model()
    with torch.no_grad():
        fresh.transformer.wte.weight.zero_()
    tenuto.load(tmp_path / "ckpts", into={"model": fresh}, strict=False)
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), model.parameters(), strict=True))
