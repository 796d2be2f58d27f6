"""What `tenuto export --to hf` writes of a Trainer's checkpoint is what from_pretrained reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).with_name("scripts")))

import torch
import transformers
from hf_trainer import Texts, model_of, padded

import tenuto
import tenuto.transformers
from support.said import lines_said
from tenuto.errors import UsageError

IDS = torch.arange(3, 11).view(1, -1)


def trained(tmp_path: Path, kind: str) -> transformers.Trainer:
    """Trains two steps of a kind, with a tokenizer."""
    from tokenizers import Tokenizer, models

    vocabulary = {f"w{number}": number for number in range(50)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")), unk_token="w0", pad_token="w0"
    )
    made = {"max_steps": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(tmp_path / "out"), **made, learning_rate=0.1)
    trainer = transformers.Trainer(
        model_of(kind), arguments, padded, train_dataset=Texts(16, 1), processing_class=tokenizer
    )
    tenuto.transformers.attach(trainer, tmp_path / "ck")
    trainer.train()
    return trainer


def export(tmp_path: Path, *more: str) -> Path:
    out = tmp_path / "exported"
    command = [sys.executable, "-m", "tenuto", "export", str(tmp_path / "ck"), str(out), "--to", "hf", *more]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return out


def test_a_model_with_tied_weights_and_its_tokenizer(tmp_path: Path) -> None:
    trainer = trained(tmp_path, "lm")
    out = export(tmp_path)
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in out.iterdir()
    }
    read = transformers.AutoModelForCausalLM.from_pretrained(out)
    trainer.model.eval()
    assert type(read) is type(trainer.model)
    assert torch.equal(read.eval()(IDS).logits, trainer.model(IDS).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("w7")["input_ids"] == [7]


def compiled_blocks(trainer: transformers.Trainer) -> None:
    blocks = trainer.model.base_model.model.transformer.h
    for number in range(len(blocks)):
        blocks[number] = torch.compile(blocks[number], backend="eager")


def of_adapter(tmp_path: Path, steps: int) -> transformers.Trainer:
    made = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "learning_rate": 0.1}
    arguments = transformers.TrainingArguments(str(tmp_path / "out"), max_steps=steps, **made)
    return transformers.Trainer(model_of("lora"), arguments, padded, train_dataset=Texts(16, 1))


@pytest.mark.parametrize("first", [True, False])
def test_an_adapter_with_compiled_blocks(tmp_path: Path, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled when it was saved and not when it is resumed, or the other way: it is the same model, and its export is
    what PEFT loads."""
    from peft import PeftModel

    for steps, compiled in ((2, first), (4, not first)):
        trainer = of_adapter(tmp_path, steps)
        if compiled:
            compiled_blocks(trainer)
        with lines_said() as lines:
            tenuto.transformers.attach(trainer, tmp_path / "ck")
            trainer.train()
        assert trainer.state.global_step == steps and not [line for line in lines if "not exact" in line]
    command = [sys.executable, "-m", "tenuto", "export", str(tmp_path / "ck"), str(tmp_path / "exported"), "--to", "hf"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "read back by peft" in done.stdout
    read = PeftModel.from_pretrained(model_of("lm"), tmp_path / "exported").eval()
    trainer.model.eval()
    assert not torch.equal(read(IDS).logits, model_of("lm").eval()(IDS).logits), "the adapter was trained"
    assert torch.equal(read(IDS).logits, trainer.model(IDS).logits)


def test_an_export_is_read_back_by_transformers_or_says_what_that_does_not_find(tmp_path: Path) -> None:
    trained(tmp_path, "lm")
    command = [sys.executable, "-m", "tenuto", "export", str(tmp_path / "ck"), str(tmp_path / "whole"), "--to", "hf"]
    assert "read back by transformers\n" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    command[5] = str(tmp_path / "renamed")
    done = subprocess.run([*command, "--rename", "wpe=positions"], check=True, capture_output=True, text=True)
    assert "from_pretrained does not find: transformer.wpe.weight" in done.stderr + done.stdout
    assert "read back by safetensors\n" in done.stdout


def test_a_migrated_checkpoint_is_no_trainers_state_and_says_what_to_do(tmp_path: Path) -> None:
    def made(place: str) -> transformers.Trainer:
        quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_steps": 2}
        arguments = transformers.TrainingArguments(str(tmp_path / place), max_steps=4, **quiet)
        return transformers.Trainer(model_of("lm"), arguments, padded, train_dataset=Texts(16, 1))

    made("out").train()
    (tmp_path / "out" / "checkpoint-4").rename(tmp_path / "last")
    command = [sys.executable, "-m", "tenuto", "migrate", str(tmp_path / "out"), str(tmp_path / "ck")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    trainer = made("again")
    tenuto.transformers.attach(trainer, tmp_path / "ck")
    with pytest.raises(UsageError, match="has no state of a Trainer") as refused:
        trainer.train()
    assert "resume_from_checkpoint=" in str(refused.value.hint)
    trainer = made("again")
    tenuto.transformers.attach(trainer, tmp_path / "fresh")
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert [one.step for one in tenuto.Repository(tmp_path / "fresh").checkpoints()] == [4]


def test_an_adapter(tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = trained(tmp_path, "lora")
    out = export(tmp_path)
    read = PeftModel.from_pretrained(model_of("lm"), out).eval()
    trainer.model.eval()
    assert not torch.equal(read(IDS).logits, model_of("lm").eval()(IDS).logits), "the adapter was trained"
    assert torch.equal(read(IDS).logits, trainer.model(IDS).logits)
