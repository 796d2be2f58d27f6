"""The best model of a training, in another program: the class of the model is all that this one shares with it.

python inference.py checkpoints
"""

import sys

import torch
from torch import nn

import tenuto


def predict(where: str, x: torch.Tensor, step: str = "best:val_loss:min") -> torch.Tensor:
    model = nn.Linear(8, 2).eval()  # as in training
    found = tenuto.load(where, into=model, step=step, device="cpu")  # every byte is verified
    print(f"step {found.step}: {dict(found.metrics)}")
    with torch.inference_mode():
        return model(x)


if __name__ == "__main__":
    print(predict(sys.argv[1], torch.ones(1, 8)))
