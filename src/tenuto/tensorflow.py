"""`tenuto.tensorflow`: what Tenuto offers to users of TensorFlow."""

from tenuto.integrations.tensorflow.manager import CheckpointManager
from tenuto.integrations.tensorflow.trackable import Trackable, trackable

__all__ = ["CheckpointManager", "Trackable", "trackable"]
