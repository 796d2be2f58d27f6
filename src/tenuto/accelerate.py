"""`tenuto.accelerate`: what Tenuto offers to those who train with accelerate."""

from tenuto.integrations.accelerate.prepared_state import state
from tenuto.integrations.accelerate.save_state import SavedStates, attach

__all__ = ["SavedStates", "attach", "state"]
