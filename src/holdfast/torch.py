"""`holdfast.torch`: what Holdfast offers to torch's users."""

from holdfast.integrations.torch import ResumableSampler

__all__ = ["ResumableSampler"]
