"""Installs the environments of `make test-trainers` below build/trainers: one for each group of frameworks that agree
on their dependencies. `python tests/trainers/install.py [NAME …]`; all of them without a name.

An environment that this machine cannot have leaves its reason in NAME.missing, and its tests skip by it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TRAINERS: Final = ROOT / "build" / "trainers"

TORCH: Final = "torch==2.13.0"
"""First and pinned: resolved after its dependents, pip pulls gigabytes of accelerator packages."""
COMMON: Final = ("pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.7", "hypothesis>=6.120", "ml_dtypes>=0.5")

ENVIRONMENTS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "torch": (
        (TORCH, "safetensors>=0.8"),
        ("lightning==2.6.6", "pytorch-lightning==2.6.5", "transformers==5.23.0", "accelerate==1.15.0", "peft==0.21.2"),
        ("trl", "datasets", "torchdata==0.11.0"),
        ("keras==3.15.1", "h5py", "gguf", "sentencepiece", "protobuf"),
    ),
    "recipes": (
        (TORCH, "safetensors>=0.8"),
        ("torchvision==0.28.0", "timm==1.0.31", "fastai==2.8.12", "fastprogress==1.0.3"),
        ("ray[train]==2.60.0",),
        ("torchtitan==0.3.0", "torchdata==0.11.0"),
    ),
    "jax": (
        ("jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "orbax-checkpoint==0.12.8", "equinox", "grain==0.2.18"),
        ("keras==3.15.1", "h5py"),
    ),
    "tensorflow": (("tensorflow-cpu==2.21.0", "keras==3.15.1"),),
    "deepspeed": ((TORCH, "safetensors>=0.8", "setuptools", "wheel"), ("deepspeed==0.19.8",)),
}
"""Each environment's packages, installed one line after the other: with what came before as constraints."""


def install(name: str) -> str:
    """Installs one environment and returns what there is to say of it."""
    directory, done = TRAINERS / name, TRAINERS / f"{name}.done"
    wanted = "\n".join(" ".join(line) for line in (*ENVIRONMENTS[name], COMMON))
    if done.exists() and done.read_text() == wanted:
        return f"{name}: there"
    began = monotonic()
    done.unlink(missing_ok=True)
    (TRAINERS / f"{name}.missing").unlink(missing_ok=True)
    python = directory / "bin" / "python"
    held = TORCH if TORCH in ENVIRONMENTS[name][0] else "setuptools"
    constraints = TRAINERS / f"{name}.constraints"
    constraints.parent.mkdir(parents=True, exist_ok=True)
    constraints.write_text(f"{held}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints)]
    commands = [[sys.executable, "-m", "venv", str(directory)]]
    for line in (*ENVIRONMENTS[name], COMMON):
        commands.append([*pip, *line])
    commands.append([*pip, "-e", str(ROOT)])
    environ = {**os.environ, "DS_BUILD_OPS": "0"}  # DeepSpeed's operators are for GPUs, and need a compiler
    for command in commands:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        if ended.returncode:
            reason = (ended.stderr or ended.stdout).strip()[-2000:]
            (TRAINERS / f"{name}.missing").write_text(reason)
            return f"{name}: missing: {reason}"
    for registrations in directory.glob("lib/python*/site-packages/torchvision/_meta_registrations.py"):
        # Built for CUDA, its operators do not load beside torch for the CPU, and what registers them raises. timm's
        # models need none.
        registrations.write_text("")
    done.write_text(wanted)
    return f"{name}: installed in {monotonic() - began:.0f} s"


def main() -> int:
    for name in sys.argv[1:] or ENVIRONMENTS:
        print(install(name), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
