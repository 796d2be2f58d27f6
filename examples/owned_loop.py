"""A trainer that owns its loop and only calls back: restore before it, tell each step, close at the end.

python owned_loop.py checkpoints
"""

import sys
from collections.abc import Callable

import torch
from torch import nn

import tenuto
from tenuto import every, keep, on


class Trainer:
    """Stands for the trainer of a library: the loop is its own, and it knows nothing of Tenuto."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        self.steps = steps
        self.global_step = 0

    def fit(self, on_train_begin: Callable[[], None], on_step_end: Callable[[float], None]) -> None:
        on_train_begin()
        while self.global_step < self.steps:
            x = torch.randn(16, 4)
            loss = nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.global_step += 1
            on_step_end(loss.item())


def train(where: str, steps: int = 40) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(nn.Linear(4, 1), steps)
    state = {"model": trainer.model, "optimizer": trainer.optimizer}
    when = every(steps=10) | on.signal()
    with tenuto.Checkpointer(where, state, run="owned", save=when, keep=keep.latest(2)) as ckpt:

        def on_train_begin() -> None:
            ckpt.restore()
            trainer.global_step = ckpt.step

        def on_step_end(loss: float) -> None:
            ckpt.step_done(step=trainer.global_step, loss=loss)

        trainer.fit(on_train_begin, on_step_end)
        print(f"step {ckpt.step}: weight {trainer.model.weight.flatten().tolist()}")
    return trainer


if __name__ == "__main__":
    train(*sys.argv[1:2] or ["checkpoints"])
