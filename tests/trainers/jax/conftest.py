"""Eight devices on one host, before JAX is imported; with TRAINERS_DEVICE=cuda the GPU of the machine instead."""

from __future__ import annotations

import os

if os.environ.get("TRAINERS_DEVICE", "cpu") == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
else:
    os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # other processes of the tests have their share
