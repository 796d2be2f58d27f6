"""Programs as `python …` runs them, forked from an interpreter that has loaded numpy and Tenuto, or torch too, and run
none of it: an interpreter that loads them anew takes most of a second of a processor, and several with torch.

What a program sees is its own: arguments, environment, directory, streams, `__main__`, random numbers that nobody has
seeded; and it ends as interpreters do, by the end of the main module, with what runs at exit. Only what an interpreter
then does to its modules is left out: to take all of torch apart takes half a second of a processor. All hash strings
alike. Tests about imports, hashes, or an interpreter's start, start one.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

ROOT = Path(__file__).parents[2]
PLAIN = (
    *("numpy", "tenuto.training.checkpointer", "tenuto.training.exit_status", "tenuto.training.preemption"),
    *("tenuto.certify.runner", "tenuto.cli.application", "tenuto.cli.commands.run", "tenuto.maintenance.flush"),
)
WITH_TORCH = (
    *("numpy", "torch._dynamo", "torch.optim.adamw", "torch.utils.data", "torchdata.stateful_dataloader"),
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "tenuto.demo.train_gpt"),
    *("tenuto.training.checkpointer", "tenuto.integrations.torch.adapter", "tenuto.integrations.torch.data.loaders"),
    *("tenuto.integrations.torch.certificate", "tenuto.integrations.torch.rng", "tenuto.cli.application"),
)
_servers: dict[tuple[str, ...], Server] = {}


class Server:
    """The interpreter that is forked from. It ends with the process that has started it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.channel, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(there.fileno()), *modules]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment
        )
        there.close()
        assert self.channel.recv(64) == b"loaded"
        self._asking = threading.Lock()
        atexit.register(self.close)

    def close(self) -> None:
        self.channel.shutdown(socket.SHUT_RDWR)  # a child of ours that still lives may hold a copy of it
        self.process.wait()

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int:
        with self._asking:  # answers come in the order of the questions
            socket.send_fds(self.channel, [json.dumps(request).encode()], descriptors)
            return int(self.channel.recv(64))


class Program:
    """A running one, as `subprocess.Popen` has it; text streams."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        torch: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stderr: int | None = None,
        session: bool = False,
    ) -> None:
        """stderr: the descriptor that it writes to, `subprocess.STDOUT` for that of stdout; else a pipe. session:
        whether it begins one of its own."""
        modules = WITH_TORCH if torch else PLAIN
        if modules not in _servers:
            _servers[modules] = Server(modules)
        self._server = _servers[modules]
        self.returncode: int | None = None
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        given = [*theirs[:2], {None: theirs[2], subprocess.STDOUT: theirs[1]}.get(stderr, stderr)]
        about = {"words": list(words), "env": dict(os.environ if env is None else env), "cwd": str(cwd or os.getcwd())}
        about["session"] = session
        self.pid = self._server.ask(about, given)
        self._ended = os.pidfd_open(self.pid)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin: IO[str] = os.fdopen(pipes[0][1], "w")
        self.stdout: IO[str] = os.fdopen(pipes[1][0])
        self.stderr: IO[str] = os.fdopen(pipes[2][0])

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the program", timeout or 0.0)
            self.returncode = self._server.ask({"reap": self.pid})
            os.close(self._ended)
        return self.returncode

    def communicate(self, answer: str = "", *, timeout: float = 60.0) -> tuple[str, str]:
        """What it still writes until it has closed both streams; it is killed where that takes longer."""
        self.stdin.write(answer)
        self.stdin.close()
        told: list[str] = []
        reader = threading.Thread(target=lambda: told.append(self.stderr.read()))
        late = threading.Timer(timeout, self.kill)
        reader.start()
        late.start()
        out = self.stdout.read()
        reader.join()
        self.wait()
        late.cancel()
        late.join()
        self.stdout.close()
        self.stderr.close()
        return out, told[0]


def run(words: Sequence[str], *, timeout: float = 60.0, **more: Any) -> subprocess.CompletedProcess[str]:
    program = Program(words, **more)
    out, err = program.communicate(timeout=timeout)
    return subprocess.CompletedProcess(list(words), program.wait(), out, err)


# -- in the server -----------------------------------------------------------------------------------------------------


def serve(channel: socket.socket) -> Callable[[], object] | None:
    """Forks what is asked for. Returns in each child, what it is to run; and here once nobody can ask any more."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not data:
            return None
        asked = json.loads(data)
        if "reap" in asked:
            _, status = os.waitpid(asked["reap"], 0)
            channel.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            return begun(asked, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(str(pid).encode())


def begun(asked: Mapping[str, Any], descriptors: Sequence[int]) -> Callable[[], object]:
    """In the child: takes on what it was asked for."""
    if asked["session"]:
        os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    np.random.seed()  # as an interpreter that loads numpy; Python's own generator does so by itself
    kind, *more = asked["words"]
    if kind == "-m":
        sys.argv = more
        sys.path.insert(0, asked["cwd"])
        return lambda: runpy.run_module(more[0], run_name="__main__", alter_sys=True)
    main = types.ModuleType("__main__")
    if kind == "-c":
        code, sys.argv = compile(more[0], "<string>", "exec"), ["-c", *more[1:]]
        sys.path.insert(0, "")
    else:
        main.__file__ = os.path.abspath(kind)
        code, sys.argv = compile(Path(kind).read_text(), main.__file__, "exec"), [kind, *more]
        sys.path.insert(0, os.path.dirname(main.__file__))
    sys.modules["__main__"] = main
    return lambda: exec(code, main.__dict__)  # its objects live as long as it does


def run_to_its_end(program: Callable[[], object]) -> int:
    """As an interpreter runs its main module. The exit status; what is raised names no line of this file."""
    try:
        program()
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        raise  # the interpreter ends by the signal
    except BaseException as error:  # noqa: BLE001 - as an interpreter does
        own, calls = error.__traceback__, 2
        while own is not None and calls:
            own, calls = own.tb_next, calls - 1
        sys.excepthook(type(error), error.with_traceback(own), own)
        return 1
    return 0


if __name__ == "__main__":
    sys.path.pop(0)  # where this file lies
    for name in sys.argv[2:]:
        importlib.import_module(name)
    importlib.import_module("support.forked_from")
    asking = socket.socket(fileno=int(sys.argv[1]))
    asking.send(b"loaded")
    program = serve(asking)
    status = run_to_its_end(program) if program is not None else 0
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
