"""FSDP2 (`fully_shard`): its hooks around state_dict only put parameters back into their shards, and need not be asked
for what they are there for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import nn

_HOME: Final = "torch.distributed.fsdp._fully_shard"


def is_its_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_HOME)


def others(hooks: Iterable[Any]) -> bool:
    """Whether any of these hooks is somebody else's."""
    return any(not is_its_own(hook) for hook in hooks)


def settling(module: nn.Module) -> list[Callable[[], Any]]:
    """What puts the module's parameters back into their shards, where a forward pass has left them gathered. No rank
    waits for another."""
    return [
        _called(hook, one)
        for one in module.modules()
        for hook in one._state_dict_pre_hooks.values()
        if is_its_own(hook)
    ]


def _called(hook: Callable[..., Any], module: nn.Module) -> Callable[[], Any]:
    return lambda: hook(module, "", False)


def settle(module: nn.Module) -> None:
    for put_back in settling(module):
        put_back()


def loaded(module: nn.Module) -> None:
    """What FSDP2 does after load_state_dict: it looks at the memory that its parameters have now."""
    for one in module.modules():
        for hook in list(one._load_state_dict_post_hooks.values()):
            if is_its_own(hook):
                hook(one, None)
