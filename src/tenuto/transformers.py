"""Tenuto in Hugging Face's Trainer, and in those of TRL: `tenuto.transformers.attach(trainer, "checkpoints")`."""

from __future__ import annotations

from tenuto.integrations.transformers.names import package

package()

from tenuto.integrations.transformers.attach import Attachment, TenutoMixin, attach  # noqa: E402

__all__ = ["Attachment", "TenutoMixin", "attach"]
