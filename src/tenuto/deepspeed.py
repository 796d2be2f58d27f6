"""`tenuto.deepspeed`: what Tenuto offers to those who train with DeepSpeed."""

from tenuto.integrations.deepspeed.engine_state import state
from tenuto.integrations.deepspeed.save_checkpoint import attach

__all__ = ["attach", "state"]
