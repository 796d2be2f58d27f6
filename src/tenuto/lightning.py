"""`tenuto.lightning`: what Tenuto offers to users of Lightning's Trainer.

`TenutoCheckpoint` takes the place of `ModelCheckpoint`, and `TenutoCheckpointIO` that of the plug-in that writes its
files. Both serve `lightning` and `pytorch_lightning`: whichever the program has imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto.integrations.lightning.callback import TenutoCheckpoint
    from tenuto.integrations.lightning.checkpoint_io import TenutoCheckpointIO

__all__ = ["TenutoCheckpoint", "TenutoCheckpointIO"]


if not TYPE_CHECKING:  # a checker that saw it would take every misspelt name for something

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'tenuto.lightning' has no attribute {name!r}")
        from tenuto.integrations.lightning.packages import public_class

        return public_class(name)  # anew each time: what the program has imported may have changed


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
