"""`tenuto.deepspeed`: what Tenuto offers to those who train with DeepSpeed."""

from tenuto.integrations.deepspeed.engine_state import state

__all__ = ["state"]
