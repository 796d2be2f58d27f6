"""Trains a small GPT on the sources of Python's own standard library.

Kill it whenever you like, `kill -9` included, and start it again with the same command: it resumes from its last
checkpoint, bit for bit as if nothing had happened.

    python train_gpt.py checkpoints
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import tenuto
from tenuto import every, keep, on

CONTEXT, WIDTH, LAYERS, HEADS, BATCH, DROPOUT = 64, 128, 3, 4, 12, 0.1


class GPT(nn.Module):
    """Predicts the next byte; the embedding is also the output layer (tied weights)."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, DROPOUT, "gelu", batch_first=True, norm_first=True)
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, 256, bias=False)
        self.output.weight = self.bytes.weight
        nn.init.normal_(self.bytes.weight, std=WIDTH**-0.5)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.bytes(text) + self.places.weight
        logits: Tensor = self.output(self.blocks(hidden, mask=self.mask, is_causal=True))
        return logits


def library(size: int = 96 * 1024) -> TensorDataset:
    """Returns the first `size` bytes of the standard library, cut into texts of CONTEXT + 1 bytes."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = bytearray()
    while len(data) < size and sources:
        data += sources.pop(0).read_bytes()
    texts = torch.frombuffer(data, dtype=torch.uint8)[: size // (CONTEXT + 1) * (CONTEXT + 1)]
    return TensorDataset(texts.view(-1, CONTEXT + 1))


def show(step: int, loss: float) -> None:
    if step % 20 == 0:
        print(f"step {step:5d}   loss {loss:.4f}", flush=True)


def train(where: str, *, run: str, steps: int, save_every: int, on_step: Any = show, **options: Any) -> None:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loader = DataLoader(library(), batch_size=BATCH, shuffle=True, drop_last=True)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    when, what = every(steps=save_every) | on.end() | on.signal(), keep.latest(3)
    with tenuto.Checkpointer(where, state, run=run, data=loader, save=when, keep=what, **options) as ckpt:
        for step in ckpt.steps(steps):
            (text,) = next(ckpt.batches)
            logits = model(text[:, :-1].int())
            loss = cross_entropy(logits.flatten(0, 1), text[:, 1:].long().flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            ckpt.log(loss=loss)
            on_step(step + 1, loss.item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a small GPT; kill it and start it again.")
    parser.add_argument("where", nargs="?", default="checkpoints", help="directory of the checkpoints")
    parser.add_argument("--run", default="gpt")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    given = parser.parse_args()
    train(given.where, run=given.run, steps=given.steps, save_every=given.save_every)
