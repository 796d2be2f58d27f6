"""A loop with a DeepSpeed engine: `deepspeed_loop.py WHERE STEPS STAGE PRECISION OUT`, started once for each rank.

OUT.RANK gets everything that there is after the last step, in the form in which each rank has it, and OUT.RANK.whole
the whole tensors. In the environment: KILL=N (it kills itself after N steps), OWN=DIRECTORY (it saves a checkpoint of
DeepSpeed's own at the end), SCALER=1 (with the loss scaler of float16), ZERO={…} (more of the configuration).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tenuto
import tenuto.deepspeed
from tenuto import every


class Model(nn.Module):
    """Tied weights, a frozen parameter, a buffer, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 11), nn.Linear(11, 6, bias=False)
        self.third = nn.Linear(6, 11, bias=False)
        self.third.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(3, 5), requires_grad=False)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.third(self.second(self.dropout(self.first(x).relu()))) * self.gain + self.frozen.sum()


def build(stage: int, precision: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 12} | more,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.05, "total_num_steps": 12},
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    decayed = [one for one in model.parameters() if one.requires_grad and one.dim() > 1]
    others = [one for one in model.parameters() if one.requires_grad and one.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def digest(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().double().reshape(-1).tolist()
    if isinstance(value, dict):
        return {str(key): digest(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [digest(one) for one in value]
    return value if isinstance(value, (int, float, str, bool)) else None


def _kept(parameter: Any) -> torch.Tensor:
    """What a rank has of a parameter. In ZeRO 3 the last ranks pad their part with what nobody reads."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter
    left = parameter.ds_numel - torch.distributed.get_rank() * parameter.ds_tensor.ds_numel
    return parameter.ds_tensor[: max(left, 0)]


def everything(engine: Any) -> dict[str, Any]:
    """What this rank has, as DeepSpeed itself keeps it."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return {
        "weights": digest([_kept(one) for one in engine.module.parameters()]),
        "buffers": digest(list(engine.module.buffers())),
        "optimizer": digest(list(inner.state.values())),
        "groups": digest([{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]),
        "counters": [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps],
        "scheduler": digest(engine.lr_scheduler.state_dict()),
        "scaler": digest(vars(getattr(engine.optimizer, "loss_scaler", engine.lr_scheduler))),
        "random": torch.get_rng_state().tolist(),
    }


def whole(engine: Any) -> dict[str, Any]:
    """Weights and moments whole, as DeepSpeed's own functions put them together."""
    if engine.zero_optimization_stage() == 0:
        return {"weights": {name: digest(one) for name, one in engine.module.named_parameters()}}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # by DeepSpeed when the first group alone had any
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    trained = [(name, one) for name, one in engine.module.named_parameters() if one.requires_grad]
    return {
        "weights": {name: digest(safe_get_full_fp32_param(one)) for name, one in trained},
        "exp_avg": {name: digest(safe_get_full_optimizer_state(one, "exp_avg")) for name, one in trained},
    }


def main() -> None:
    where, steps, stage, precision, out = sys.argv[1:]
    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    engine = build(int(stage), precision, **json.loads(os.environ.get("ZERO", "{}")))
    if os.environ.get("SCALER"):  # float16, which alone has one, does not run on processors
        engine.optimizer.loss_scaler = DynamicLossScaler(2.0, 2, 1, 2, False)
    torch.manual_seed(7 + rank)
    data = torch.rand(64, 6, generator=torch.Generator().manual_seed(rank))
    loader = DataLoader(TensorDataset(data), batch_size=4, shuffle=True)
    state = tenuto.deepspeed.state(engine)
    kill = int(os.environ.get("KILL", "0"))
    with tenuto.Checkpointer(where, state, data=loader, save=every(steps=1), keep=tenuto.keep.all()) as ckpt:
        for step in ckpt.steps(int(steps)):
            for _ in range(2):
                (x,) = next(ckpt.batches)
                loss = engine(x.to(torch.bfloat16 if precision == "bf16" else torch.float32)).float().square().mean()
                engine.backward(loss)
                engine.step()
            if step + 1 == kill:
                ckpt.save(wait=True)
                os.kill(os.getpid(), signal.SIGKILL)
        Path(f"{out}.{rank}.whole").write_text(json.dumps(whole(engine)))
        Path(f"{out}.{rank}").write_text(json.dumps(everything(engine)))
        if own := os.environ.get("OWN"):
            engine.save_checkpoint(own)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
