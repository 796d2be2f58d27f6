"""Training state <-> leaves: plain values exactly typed, tensors as leaves, and the way back into existing objects."""

from holdfast.state.flattener import Flattener, flatten
from holdfast.state.nodes import leaf_paths
from holdfast.state.prepare import prepare
from holdfast.state.registry import register
from holdfast.state.tagged import Tagged

__all__ = ["Flattener", "Tagged", "flatten", "leaf_paths", "prepare", "register"]
