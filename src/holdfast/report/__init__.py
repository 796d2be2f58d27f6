"""Sinks that show events to people and machines: a progress bar, JSON lines, the log of the standard library."""

from holdfast.report.jsonlines import JsonLines
from holdfast.report.log import LogSink
from holdfast.report.progress import ProgressBar

__all__ = ["JsonLines", "LogSink", "ProgressBar"]
