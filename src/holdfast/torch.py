"""`holdfast.torch`: what Holdfast offers to torch's users."""

from holdfast.integrations.torch import ResumableSampler as ResumableSampler
