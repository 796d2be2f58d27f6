"""`tenuto.torch`: what Tenuto offers to torch's users."""

from tenuto.integrations.torch import ResumableSampler

__all__ = ["ResumableSampler"]
