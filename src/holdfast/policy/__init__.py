"""When to save and what to keep: decisions with reasons, made from facts that the caller brings. No I/O, no clock."""

from holdfast.policy import keep, on
from holdfast.policy.triggers import every

__all__ = ["every", "keep", "on"]
