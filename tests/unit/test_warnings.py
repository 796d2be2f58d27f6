"""Python warnings of Tenuto are of one class, and point at the line of the user's code that they are about."""

import contextlib
import inspect
import logging
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

import tenuto
from tenuto import events


class Heard:
    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)


def line():
    return inspect.currentframe().f_back.f_lineno


def test_a_warning_points_at_the_line_that_called_tenuto(tmp_path):
    with pytest.warns(tenuto.TenutoWarning, match="no step was completed") as told:
        with tenuto.Checkpointer(tmp_path, {"x": 1}) as ckpt:
            ckpt.save(wait=True)
            called = line() + 1
            ckpt.save()
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, called)]


def test_a_warning_points_at_the_line_of_a_with_statement_through_contextlib():
    @contextlib.contextmanager
    def block():
        yield
        events.warn("left")

    # What a context manager of Tenuto's own does: its generator lies in the package, contextlib between it and here.
    code = block.__wrapped__.__code__.replace(co_filename=events.__file__)
    block.__wrapped__.__code__ = code
    with pytest.warns(tenuto.TenutoWarning, match="left") as told:
        called = line() + 1
        with block():
            pass
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, called)]


def test_in_a_thread_of_tenutos_own_it_is_a_line_of_the_log(caplog):
    heard = Heard()
    emitter = events.Emitter.of([heard])
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "tenuto"):
        warnings.simplefilter("error")
        for warn in (events.warn, emitter.warn):
            thread = threading.Thread(target=warn, args=("nothing of yours runs here",))
            thread.start()
            thread.join()
    assert caplog.messages == ["nothing of yours runs here"] * 2
    assert len(heard.events) == 1


def test_a_warning_about_code_that_lies_in_no_file():
    done = subprocess.run(
        [sys.executable, "-c", "from tenuto import events\nevents.warn('odd')"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "<string>:2: TenutoWarning: odd\n")


def test_sinks_hear_that_it_was_issued_as_a_python_warning():
    heard = Heard()
    with pytest.warns(tenuto.TenutoWarning, match="odd"):
        events.Emitter.of([heard]).warn("odd", "main")
    assert heard.events == [events.Warned("odd", "main", issued=True)]


def test_nothing_else_in_the_package_issues_python_warnings():
    package = Path(tenuto.__file__).parent
    found = [
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        if re.search(r"\bwarnings\.warn", path.read_text(encoding="utf-8"))
    ]
    assert found == ["events.py"]
