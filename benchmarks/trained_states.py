"""The states of a small language model in training, a few steps apart: what the benchmarks of encodings encode.

The demo's GPT, twice as wide, is trained on the sources of Python's standard library the way mixed precision does it:
the optimizer updates fp32 master weights, and forward and backward see them rounded to bf16. A state has the master
weights, the bf16 weights and both moments of Adam. It is trained once and kept in `build/`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tenuto.demo import train_gpt

KEPT = Path(__file__).parent.parent / "build" / "trained_states"
WIDTH = 256
RATE = 3e-4
GAPS = (1, 10, 100)
PARTS = ("weights bf16", "weights fp32", "moment m fp32", "moment v fp32")

State = dict[str, dict[str, torch.Tensor]]
"""The tensors of each of PARTS by their names."""


def states(steps: int = 700, gaps: tuple[int, ...] = GAPS, kept: Path = KEPT) -> dict[int, State]:
    """Returns the state after `steps` steps under 0, and under each of `gaps` the state so many steps before. kept: the
    directory in which they are looked for first, and left."""
    wanted = {steps - gap: gap for gap in (0, *gaps) if gap < steps}
    path = kept / f"{steps}_{'_'.join(map(str, sorted(wanted)))}.pt"
    if not path.exists():
        found = _trained(steps, wanted)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, path)
    return torch.load(path)


def _trained(steps: int, wanted: dict[int, int]) -> dict[int, State]:
    torch.manual_seed(0)
    train_gpt.WIDTH = WIDTH
    model = train_gpt.GPT()
    names = [name for name, _ in model.named_parameters()]
    masters = [one.detach().clone() for one in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=RATE)
    loader = DataLoader(train_gpt.library(1 << 20), batch_size=train_gpt.BATCH, shuffle=True, drop_last=True)
    found: dict[int, State] = {}
    texts = iter(loader)
    for step in range(1, steps + 1):
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master.bfloat16())
        (text,) = next(texts, None) or next(texts := iter(loader))
        logits = model(text[:, :-1].int())
        loss = cross_entropy(logits.flatten(0, 1), text[:, 1:].long().flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad
        optimizer.step()
        if step in wanted:
            moments = [optimizer.state[master] for master in masters]
            columns = (
                [master.bfloat16() for master in masters],
                [master.clone() for master in masters],
                [one["exp_avg"].clone() for one in moments],
                [one["exp_avg_sq"].clone() for one in moments],
            )
            found[wanted[step]] = {
                part: dict(zip(names, column, strict=True)) for part, column in zip(PARTS, columns, strict=True)
            }
    return found
