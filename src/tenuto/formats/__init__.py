"""Checkpoints of other tools: `read` opens one of any known format without running code from it."""

from tenuto.formats.contract import Content, PiecedTensor, RawFile, RawTensor, Reader, Tensor
from tenuto.formats.registry import Format, detect, formats, read

__all__ = ["Content", "Format", "PiecedTensor", "RawFile", "RawTensor", "Reader", "Tensor", "detect", "formats", "read"]
