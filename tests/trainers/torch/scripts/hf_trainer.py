"""A training by Hugging Face's Trainer, in several kinds (--kind), as the suite of trainers runs it. Plainly, without
Tenuto, with `--where ""`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

KINDS = (
    *("lm", "best", "accumulate", "lora", "bestlora", "group", "iterable", "streamed_masks", "masks", "neftune"),
    *("workers", "epochs", "plateau", "sft", "seq2seq", "short", "counted", "masks_workers", "masks_kept"),
)
DEVICE = os.environ.get("TRAINERS_DEVICE", "cpu")
"""`cuda` trains on the GPU of the machine, by kernels that do the same twice."""
if DEVICE != "cpu":
    torch.use_deterministic_algorithms(True)
TIMES = ("runtime", "per_second", "flos")


class Texts(Dataset):
    def __init__(self, count: int, seed: int, *, ragged: bool = False) -> None:
        chosen = np.random.default_rng(seed)
        lengths = chosen.integers(4, 13, count) if ragged else np.full(count, 8)
        self.rows = [torch.as_tensor(chosen.integers(3, 50, int(length))) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[number], "labels": self.rows[number].clone()}


class Stream(IterableDataset):
    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def __iter__(self):
        for number in range(len(self.texts)):
            yield self.texts[number]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def pad(name: str, value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)

    ids = pad("input_ids", 0)
    return {"input_ids": ids, "labels": pad("labels", -100), "attention_mask": (ids != 0).long()}


def masked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Draws a mask from every generator, in the process that reads."""
    batch = padded(rows)
    mask = torch.rand(batch["input_ids"].shape) < 0.2
    mask |= torch.as_tensor(np.random.rand(*mask.shape) < 0.1)
    if random.random() < 0.5:
        mask[:, 1] = True
    batch["input_ids"] = batch["input_ids"].masked_fill(mask, 2)
    return batch


class Steps(TrainerCallback):
    """Prints each step, and counts by itself what a callback can keep: nothing of it may differ after a resume."""

    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step}", flush=True)


class Counting(TrainerCallback, transformers.trainer_callback.ExportableState):
    def __init__(self) -> None:
        self.seen = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.seen += 1
        if self.seen == 10:
            control.should_training_stop = True

    def state(self) -> dict:
        return {"args": {}, "attributes": {"seen": self.seen}}


def model_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "seq2seq":
        config = transformers.T5Config(
            vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config)
    if kind in ("lora", "bestlora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM")
        )
    return model


def arguments(kind: str, place: str, options: argparse.Namespace) -> dict[str, object]:
    found: dict[str, object] = {
        "output_dir": place,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "learning_rate": 1e-2,
        "use_cpu": DEVICE == "cpu",
        "disable_tqdm": True,
        "seed": 7,
        "dataloader_num_workers": 0,
        "lr_scheduler_type": "cosine",
    }
    extra: dict[str, dict[str, object]] = {
        "best": {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "accuracy",
            "num_train_epochs": 6,
            "save_total_limit": 2,
        },
        "accumulate": {"gradient_accumulation_steps": 4, "num_train_epochs": 4, "per_device_train_batch_size": 2},
        "group": {"train_sampling_strategy": "group_by_length"},
        "iterable": {"max_steps": 15, "num_train_epochs": 1},
        "streamed_masks": {"max_steps": 15, "num_train_epochs": 1},
        "neftune": {"neftune_noise_alpha": 5.0},
        "workers": {"dataloader_num_workers": 2},
        "masks_workers": {"dataloader_num_workers": 2},
        "masks_kept": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        "epochs": {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"},
        "plateau": {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 0.5},
            "metric_for_best_model": "loss",
        },
        "short": {"max_steps": 8, "num_train_epochs": 1},
    }
    extra["bestlora"] = {**extra["best"], "metric_for_best_model": "loss", "num_train_epochs": 3}
    return {**found, **extra.get(kind, {}), **json.loads(options.arguments)}


def accuracy(prediction) -> dict[str, float]:
    hits = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(hits.mean())}


def trainer_of(kind: str, place: str, options: argparse.Namespace) -> Trainer:
    given = arguments(kind, place, options)
    texts = Texts(22 if kind == "accumulate" else 20, 1, ragged=kind == "group" or kind.startswith("masks"))
    train = Stream(texts) if kind in ("iterable", "streamed_masks") else texts
    collator = masked if kind.startswith("masks") or kind == "streamed_masks" else padded
    callbacks: list[TrainerCallback] = [Steps()]
    if kind == "best":
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=3))
    if kind == "counted":
        callbacks.append(Counting())
    common = {"train_dataset": train, "data_collator": collator, "callbacks": callbacks}
    if given.get("eval_strategy", "no") != "no":
        common["eval_dataset"] = Texts(8, 2)
    if kind == "sft":
        return sft(given, callbacks)
    if kind == "seq2seq":
        made = transformers.Seq2SeqTrainingArguments(**given)
        return transformers.Seq2SeqTrainer(model_of(kind), made, **common)
    if kind == "best":
        common["compute_metrics"] = accuracy
    return Trainer(model_of(kind), TrainingArguments(**given), **common)


def sft(given: dict[str, object], callbacks: list[TrainerCallback]) -> Trainer:
    from datasets import Dataset as Table
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl import SFTConfig, SFTTrainer

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    chosen = np.random.default_rng(3)
    texts = [" ".join(f"w{word}" for word in chosen.integers(0, 40, chosen.integers(4, 9))) for _ in range(20)]
    config = SFTConfig(**given, max_length=12, dataset_num_proc=None)
    table = Table.from_dict({"text": texts})
    return SFTTrainer(model_of("sft"), args=config, train_dataset=table, processing_class=fast, callbacks=callbacks)


# -- the result --------------------------------------------------------------------------------------------------------


def digest(value: object) -> str:
    hashed = hashlib.sha256()

    def put(one: object) -> None:
        if isinstance(one, torch.Tensor):
            hashed.update(f"{one.dtype} {tuple(one.shape)}".encode())
            hashed.update(one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, np.ndarray):
            hashed.update(one.tobytes())
        elif isinstance(one, dict):
            for key in sorted(one, key=str):
                hashed.update(str(key).encode())
                put(one[key])
        elif isinstance(one, list | tuple):
            for inner in one:
                put(inner)
        else:
            hashed.update(repr(one).encode())

    put(value)
    return hashed.hexdigest()[:16]


def result(trainer: Trainer, output) -> dict[str, object]:
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    found = {f"model/{name}": digest(tensor) for name, tensor in model.state_dict().items()}
    found["optimizer"] = digest(trainer.optimizer.state_dict())
    found["scheduler"] = digest({k: v for k, v in trainer.lr_scheduler.state_dict().items() if k != "lr_lambdas"})
    found["torch"] = digest(torch.get_rng_state())
    if DEVICE != "cpu":
        found["device"] = digest(torch.cuda.get_rng_state())
    found["numpy"] = digest(np.random.get_state()[1])
    found["python"] = digest(random.getstate())
    kept = [
        {name: value for name, value in entry.items() if not any(time in name for time in TIMES)}
        for entry in trainer.state.log_history
    ]
    state = trainer.state
    counters = {
        "global_step": state.global_step,
        "epoch": state.epoch,
        "flos": state.total_flos,
        "tokens": state.num_input_tokens_seen,
        "best_metric": state.best_metric,
        "best_global_step": state.best_global_step,
        "train_loss": output.training_loss,
        "stopped": trainer.control.should_training_stop,
        "callbacks": {
            type(one).__name__: one.state()["attributes"]
            for one in trainer.callback_handler.callbacks
            if hasattr(one, "state")
        },
    }
    return {"digest": found, "history": [*kept, counters]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume-from", default="latest")
    parser.add_argument("--every-step", action="store_true")
    parser.add_argument("--kind", default="lm", choices=KINDS)
    parser.add_argument("--arguments", default="{}", help="more TrainingArguments, as JSON")
    parser.add_argument("--options", default="{}", help="more arguments of attach, as JSON")
    parser.add_argument("--steps-at-once", type=int, default=0)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rank = int(os.environ.get("RANK", "0"))
    with tempfile.TemporaryDirectory() as place:
        given = json.loads(options.arguments)
        trainer = trainer_of(options.kind, given.get("output_dir", place), options)
        if options.where:
            attach(trainer, options)
        output = trainer.train()
        if rank == 0:
            Path(options.out).write_text(json.dumps(result(trainer, output)))


def attach(trainer: Trainer, options: argparse.Namespace) -> None:
    import tenuto.transformers
    from tenuto import every, keep, on

    more = json.loads(options.options)
    if options.every_step:
        more |= {"save": every(steps=1) | on.signal() | on.end(), "keep": keep.all()}
    start = options.resume_from
    more["resume_from"] = int(start) if start.isdigit() else start
    tenuto.transformers.attach(trainer, options.where, **more)


if __name__ == "__main__":
    sys.exit(main())
