"""No server outlives the run that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

_RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from campaigns.ports import free_port
from stores.server_process import ServerProcess, answers
port = free_port()
server = ServerProcess([sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
                       Path(sys.argv[2]) / "log", answers(port))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_server_goes_with_its_run(tmp_path: Path, end: signal.Signals) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, tests, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as run:
        assert run.stdout is not None
        server = psutil.Process(int(run.stdout.readline()))
        os.kill(run.pid, end)
        run.wait(30)
        server.wait(30)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    from stores.server_process import ServerProcess

    server = ServerProcess([sys.executable, "-c", "exit('no room')"], tmp_path / "log", lambda: False)
    with pytest.raises(RuntimeError, match="no room"):
        server.start()
