"""What happens while a command works, on stderr."""

from __future__ import annotations

from tenuto.cli.console import output
from tenuto.events import Event, Warned


class WarningReporter:
    """A sink that prints warnings, each a line."""

    def emit(self, event: Event) -> None:
        if isinstance(event, Warned):
            output.story(f"warning: {event.message}")
