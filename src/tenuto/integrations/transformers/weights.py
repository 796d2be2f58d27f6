"""What of a model is saved: all of it, or the trained part of one with adapters; and the files that from_pretrained
reads beside the weights."""

from __future__ import annotations

import copy
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tenuto.integrations.torch.wrappers import unwrapped_names

SAMPLES: Final = 16
"""Elements of each frozen parameter that go into the digest of a base model."""
ENTRY: Final = "hf_files"


class ModelFiles:
    """The files of a model besides its weights: configuration, generation, tokenizer, adapters. They are saved with
    each checkpoint and not taken from one: this program's own count."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(files)

    @classmethod
    def of(cls, trainer: Any, model: nn.Module) -> ModelFiles:
        with tempfile.TemporaryDirectory(prefix="tenuto-") as name:
            place = Path(name)
            for config in _configs(model):
                config.save_pretrained(place)
            collator = getattr(trainer.data_collator, "tokenizer", None)
            processing = trainer.processing_class if trainer.processing_class is not None else collator
            if processing is not None:
                processing.save_pretrained(place)
            return cls({path.name: path.read_bytes() for path in sorted(place.iterdir()) if path.is_file()})

    def state_dict(self) -> dict[str, bytes]:
        return dict(self._files)

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def _configs(model: Any) -> Iterator[Any]:
    """Yields what says how the model is built, as its `save_pretrained` would write it."""
    if is_peft(model):
        if len(model.peft_config) == 1:
            adapter = copy.copy(next(iter(model.peft_config.values())))
            adapter.inference_mode = True
            yield adapter
    elif getattr(model, "config", None) is not None and hasattr(model.config, "save_pretrained"):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = str(model.dtype).removeprefix("torch.")
        yield config
        if model.can_generate() and model.generation_config is not None:
            yield model.generation_config


def is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters of a model with adapters that are trained, and the buffers that training changes, by the
    names that PEFT gives them in a file of an adapter. Blocks that are compiled have the names that they would have
    otherwise."""
    saved, plain = _names_in_file(model), unwrapped_names(model)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[plain(saved.get(parameter.data_ptr(), name))] = parameter
    for prefix, module in model.named_modules():
        own = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if not own and not isinstance(module, _NormBase):
            continue
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                found[plain(saved.get(buffer.data_ptr(), name))] = buffer
    return found


def _names_in_file(model: Any) -> dict[int, str]:
    """Returns the names by the tensors' addresses. Of several adapters each keeps its own names."""
    if len(model.peft_config) != 1:
        return {}
    from peft import get_peft_model_state_dict

    (adapter,) = model.peft_config
    of_file = get_peft_model_state_dict(model, adapter_name=adapter)
    return {tensor.data_ptr(): name for name, tensor in of_file.items() if tensor.numel()}


def base_of(model: Any, training: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Describes the frozen base: what it was loaded from, and a digest of a few elements of each parameter."""
    config = next(iter(model.peft_config.values()))
    hashed = hashlib.sha256()
    inside, plain = {id(tensor) for tensor in training.values()}, unwrapped_names(model)
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            hashed.update(f"{plain(name)} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            hashed.update(b"".join(_sample(parameter)))
    return {
        "name": getattr(config, "base_model_name_or_path", None),
        "revision": getattr(config, "revision", None),
        "digest": hashed.hexdigest()[:32],
    }


def _sample(parameter: torch.Tensor) -> Iterator[bytes]:
    flat = parameter.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
    yield few.contiguous().cpu().view(torch.uint8).numpy().tobytes()
