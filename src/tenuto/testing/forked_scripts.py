"""Runs a script several times, each in a process forked from one that has imported its frameworks: `python -m
tenuto.testing.forked_scripts MODULE,MODULE` with a list of argument lists, as JSON, on standard input. Writes the exit
status and the standard error of each to `forked.json`."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Never


def main() -> None:
    jobs = json.loads(sys.stdin.read())
    for name in filter(None, sys.argv[1].split(",")):
        import_module(name)
    found = []
    for arguments in jobs:
        with tempfile.TemporaryFile() as errors:
            child = os.fork()
            if child == 0:
                os.dup2(errors.fileno(), 2)
                _become(arguments)
            _, status = os.waitpid(child, 0)
            errors.seek(0)
            found.append([os.waitstatus_to_exitcode(status), errors.read().decode(errors="replace")])
    Path("forked.json").write_text(json.dumps(found))


def _become(arguments: list[str]) -> Never:
    """Runs the script as a process that was started with it would."""
    sys.argv[:] = arguments
    sys.path[0] = os.path.dirname(arguments[0])
    code = 1
    try:
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - printed, and told by the exit status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
