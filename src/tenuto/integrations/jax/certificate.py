"""JAX's part of a certificate: the settings that change the numbers of the same program, and the versions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax

from tenuto.integrations.jax.versions import private
from tenuto.training.snapshot import Findings

_SETTINGS: Final = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_numpy_dtype_promotion", "jax_disable_jit"),
)
_DETERMINISTIC: Final = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_exclude_nondeterministic_ops=true")


def findings(state: Mapping[str, Any]) -> Findings:
    """Reads settings only: touches no array, waits for no device."""
    if not private("initialised")():
        return Findings(versions={"jax": jax.__version__})
    flags = os.environ.get("XLA_FLAGS", "")
    settings = {name: str(value) for name in _SETTINGS if (value := getattr(jax.config, name, None)) is not None}
    settings |= {"jax_backend": jax.default_backend(), "jax_devices": jax.device_count()}
    versions = {"jax": jax.__version__}
    return Findings(tuple(_nondeterminism(flags)), (), settings, versions)


def _nondeterminism(flags: str) -> Iterator[str]:
    if jax.default_backend() == "gpu" and not any(one in flags for one in _DETERMINISTIC):
        yield f"XLA may choose non-deterministic kernels: XLA_FLAGS lacks {_DETERMINISTIC[0]}"
