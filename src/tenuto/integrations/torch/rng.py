"""torch's global generators as plain values."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from tenuto.errors import StateMismatch

# torch reads a generator under a lock of its own and makes the Python object for it inside: where that object's
# allocation collects garbage and a finalizer lets other threads run, a second thread that reads the generator waits
# for that lock with the interpreter's in hand, for ever.
_reading: Final = threading.RLock()


def capture(*, devices: bool = True) -> dict[str, Any]:
    """Returns the states: `cpu` (uint8 [5056]) and, with `devices`, `cuda` (one uint8 tensor per device, if CUDA is
    initialised) and `mps` likewise.

    Uninitialised CUDA is left alone: nothing has been drawn there, and asking would initialise it.
    """
    with _reading:
        out: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if not devices:
            return out
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            out["cuda"] = list(torch.cuda.get_rng_state_all())
        if torch.backends.mps.is_available():
            out["mps"] = torch.mps.get_rng_state()
        return out


def apply(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Sets the generators. Returns descriptions of states without a counterpart here."""
    notes: list[str] = []
    _set(torch.set_rng_state, state["cpu"], "rng/torch/cpu")
    devices = list(state.get("cuda", ()))
    present = torch.cuda.device_count() if devices and torch.cuda.is_available() else 0
    for number, saved in enumerate(devices[:present]):
        _set(lambda value, device=number: torch.cuda.set_rng_state(value, device), saved, f"rng/torch/cuda/{number}")
    if len(devices) > present:
        notes.append(f"the checkpoint holds generators of {len(devices)} CUDA devices, and {present} are here")
    if "mps" in state:
        if torch.backends.mps.is_available():
            _set(torch.mps.set_rng_state, state["mps"], "rng/torch/mps")
        else:
            notes.append("the checkpoint holds the generator of an MPS device, and none is here")
    return tuple(notes)


def derived(part: str, state: Any, seed: int) -> Any:
    """Returns a new state for the `part` of `capture`, seeded with `seed`, in the form of `state`; None if the device
    is absent."""
    if part == "cpu":
        return _seeded("cpu", seed)
    if part == "cuda" and torch.cuda.is_available():
        return [
            _seeded(f"cuda:{number}", seed + number) for number in range(min(len(state), torch.cuda.device_count()))
        ]
    return _seeded("mps", seed) if part == "mps" and torch.backends.mps.is_available() else None


def _seeded(device: str, seed: int) -> torch.Tensor:
    return torch.Generator(device).manual_seed(seed % 2**63).get_state()


@contextmanager
def preserved() -> Iterator[None]:
    """Restores torch's CPU generator after the block, which may draw from it."""
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Returns the generators of a loader, each once: DataLoader passes its own to the sampler it makes."""
    found: list[torch.Generator] = []
    batch_sampler = loader.batch_sampler
    divided = getattr(batch_sampler, "batch_sampler", None)  # accelerate's, around the one that has the order
    order = (getattr(one, "sampler", None) for one in (batch_sampler, divided))
    for owner in (loader, batch_sampler, divided, *order, loader.sampler):
        generator = None if is_seedable(owner) else getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found


def is_seedable(sampler: Any) -> bool:
    """Returns whether this is the sampler of accelerate that seeds its generator, made late, at each epoch."""
    kind = type(sampler)
    return (kind.__module__, kind.__name__) == ("accelerate.data_loader", "SeedableRandomSampler")


def set_generators(generators: Sequence[torch.Generator], states: Sequence[Any], path: str) -> None:
    """Sets each generator to its state. Raises StateMismatch for an invalid state."""
    for number, (generator, saved) in enumerate(zip(generators, states, strict=True)):
        _set(generator.set_state, saved, f"{path}/{number}")


def _set(setter: Any, saved: Any, path: str) -> None:
    try:
        setter(torch.as_tensor(saved, dtype=torch.uint8, device="cpu").contiguous())
    except (RuntimeError, TypeError, ValueError) as error:
        raise StateMismatch(f"{path} is not a state of this generator: {error}", subject=path) from error
