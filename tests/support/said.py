"""What Tenuto says in one line each, through the logger `tenuto`."""

import logging
import re
from contextlib import contextmanager


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@contextmanager
def said(pattern):
    """Asserts that a line which matches `pattern` is said meanwhile; yields the list of all lines."""
    logger, handler = logging.getLogger("tenuto"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert any(re.search(pattern, line) for line in handler.lines), (pattern, handler.lines)
