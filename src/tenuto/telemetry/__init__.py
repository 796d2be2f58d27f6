"""Sinks that show events to people and machines: a progress bar, JSON lines, the standard library's log."""

from tenuto.telemetry.jsonlines import JsonLines
from tenuto.telemetry.log import LogSink
from tenuto.telemetry.progress import ProgressBar

__all__ = ["JsonLines", "LogSink", "ProgressBar"]
