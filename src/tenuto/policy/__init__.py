"""When to save and what to keep: decisions with reasons, made from facts that the caller passes. No I/O, no clock."""

from tenuto.policy import keep, on
from tenuto.policy.save import every

__all__ = ["every", "keep", "on"]
