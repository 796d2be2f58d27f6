"""`tenuto.keras`: what Tenuto offers to users of Keras 3."""

from tenuto.integrations.keras.checkpoint import TenutoCheckpoint
from tenuto.integrations.keras.data import ResumableData, resumable
from tenuto.integrations.keras.variables import weights

__all__ = ["ResumableData", "TenutoCheckpoint", "resumable", "weights"]
