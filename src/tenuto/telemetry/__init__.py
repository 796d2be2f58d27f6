"""Sinks that show events to people and machines: a progress bar, JSON lines, the standard library's log."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto.telemetry.jsonlines import JsonLines
    from tenuto.telemetry.log import LogSink
    from tenuto.telemetry.progress import ProgressBar

__all__ = ["JsonLines", "LogSink", "ProgressBar"]

_HOME = {"JsonLines": "jsonlines", "LogSink": "log", "ProgressBar": "progress"}

if not TYPE_CHECKING:  # a process that loads once uses none of them

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'tenuto.telemetry' has no attribute {name!r}")
        return getattr(import_module(f"tenuto.telemetry.{_HOME[name]}"), name)
