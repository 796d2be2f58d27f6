"""What `import tenuto` gives, before anything else of it was asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tenuto


@pytest.mark.parametrize("name", ["errors.StoreFull", "events.Committed", "telemetry.LogSink"])
def test_a_module_that_pages_write_is_there_without_an_import_of_its_own(name: str) -> None:
    module = name.partition(".")[0]
    program = (
        f"import sys, tenuto; assert 'tenuto.{module}' not in sys.modules; "
        f"assert '{module}' in dir(tenuto); tenuto.{name}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_misspelt_name_is_none() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'telemetries'"):
        tenuto.telemetries  # type: ignore[attr-defined]  # noqa: B018
