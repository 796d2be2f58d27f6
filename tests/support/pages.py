"""A page of documentation, run: its Python, its scripts and its commands, in order, and what they print.

- A `python` block whose first line is `# name.py` is a script: it is written to that file, and so is a `toml` block
  whose first line is `# name.toml`. Any other runs at once; the
  blocks of a page share one namespace. A `text` block directly below is what it prints.
- In `console` and `sh` blocks `python name.py` of a script of the page runs in a process of its own, and so does
  `tenuto …` from there on; on a page without scripts that runs in this process. In a `console` block the lines below a
  command are what it prints, on stdout and stderr; with none nothing is compared. A command that fails is one whose
  status the next line shows: `$ echo $?`.

Numbers, durations, sizes and the widths of columns differ from machine to machine, and are not compared.
"""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support import loaded_interpreter
from tenuto.cli import main

ENVIRONMENT = {
    "COLUMNS": "90",
    "OMP_NUM_THREADS": "1",
    # `python` of a command that starts another one is this interpreter, with this checkout
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
}


@dataclass(frozen=True)
class Block:
    language: str
    line: int
    text: str
    begin: int
    end: int
    adjoins: bool
    """Whether nothing but empty lines lies between it and the block before."""


def blocks(text: str) -> Iterator[Block]:
    last = 0
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        line = text[: found.start()].count("\n") + 2
        adjoins = last > 0 and not text[last : found.start()].strip()
        yield Block(found[1], line, found[2], found.start(2), found.end(2), adjoins)
        last = found.end()


@dataclass
class Page:
    path: Path
    directory: Path
    changes: Mapping[str, str]
    """Changes to the blocks before they run."""
    not_run: Mapping[str, str]
    """Beginnings of commands that are not run."""
    update: bool = False
    names: dict[str, object] = field(default_factory=dict)
    printed: str = ""
    status: int = 0
    scripts: set[str] = field(default_factory=set)

    def run(self) -> None:
        text = self.path.read_text()
        written = []
        for block in blocks(text):
            if block.language == "python":
                self.python(block)
            elif block.language == "toml" and (file := re.match(r"# (\w+\.toml)\n", block.text)):
                (self.directory / file[1]).write_text(self.here(block.text))
            elif block.language in ("console", "sh"):
                written.append((block, self.commands(block)))
            elif block.language == "text" and block.adjoins and self.printed:
                self.compare(block, block.text, self.printed)
                written.append((block, self.printed))
            if block.language != "python":
                self.printed = ""
        if self.update:
            for block, now in reversed(written):
                text = text[: block.begin] + now + text[block.end :]
            self.path.write_text(text)

    def python(self, block: Block) -> None:
        text = self.here(block.text)
        if script := re.match(r"# (\w+\.py)\n", text):
            (self.directory / script[1]).write_text(text)
            self.scripts.add(script[1])
            return
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            # As many empty lines before it as there are lines on the page: a traceback names the page's own line.
            exec(compile("\n" * (block.line - 1) + text, str(self.path), "exec"), self.names)
        self.printed = self.neutral(printed.getvalue())

    def here(self, text: str) -> str:
        """The text with `/data` below the directory that it runs in, and with the page's changes."""
        text = re.sub(r'([" ])/data/', r"\1data/", text)
        for written, instead in self.changes.items():
            text = text.replace(written, instead)
        return text

    def commands(self, block: Block) -> str:
        """Runs the commands, and returns the block with what they print now."""
        now = []
        lines = block.text.splitlines()
        starts = [n for n, line in enumerate(lines) if block.language == "sh" or line.startswith("$ ")]
        assert not lines or starts[:1] == [0], f"{self.at(block)}: a console block begins with a command"
        for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
            command, said = lines[start].removeprefix("$ "), "".join(f"{line}\n" for line in lines[start + 1 : stop])
            shown_next = stop < len(lines) and lines[stop] == "$ echo $?"
            printed = self.command(block, self.here(command), shown_next)
            now.append(f"{lines[start]}\n")
            if said and printed is not None:
                self.compare(block, said, printed)
                now.append(printed)
            else:
                now.append(said)
        return "".join(now)

    def command(self, block: Block, command: str, may_fail: bool) -> str | None:
        """What it prints; None where it is not run."""
        words = shlex.split(command, comments=True)
        environment = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        if not words:
            return None
        if command == "echo $?":
            return f"{self.status}\n"
        script = words[0] == "python" and len(words) > 1 and words[1] in self.scripts
        if not script and any(command.startswith(beginning) for beginning in self.not_run):
            return None
        if "|" in words:  # what another program makes of the output is that program's
            words, rest = words[: words.index("|")], words[words.index("|") + 1 :]
            assert rest[0] in self.not_run, f"{self.at(block)}: not listed in NOT_RUN: {command}"
        assert script or words[0] == "tenuto", f"{self.at(block)}: neither run nor listed in NOT_RUN: {command}"
        if script or self.scripts:  # what a script left in memory, only another process sees
            program = words[1:] if script else ["-c", "from tenuto.cli import main; main()", *words[1:]]
            torch = script and "torch" in (self.directory / words[1]).read_text()
            left = loaded_interpreter.run(
                program, torch=torch, cwd=self.directory, env={**os.environ, **ENVIRONMENT, **environment},
                stderr=subprocess.STDOUT, timeout=120,
            )  # fmt: skip
            printed, self.status = left.stdout, left.returncode
        else:
            printed, self.status = run_tenuto(words[1:], environment)
        assert may_fail or not self.status, f"{self.at(block)}: {command} left with {self.status}: {printed}"
        return self.neutral(printed)

    def compare(self, block: Block, said: str, printed: str) -> None:
        if not self.update:
            assert masked(said) == masked(printed), f"{self.at(block)}: prints now:\n{printed}"

    def neutral(self, printed: str) -> str:
        """What is printed, without what names this machine."""
        printed = printed.replace(f"{self.directory}/", "/data/").replace(str(self.directory), "/data")
        printed = printed.replace(socket.gethostname(), "node1")
        printed = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "ada", printed)
        return re.sub(r"[ \t]+$", "", printed, flags=re.M)

    def at(self, block: Block) -> str:
        return f"{self.path.name}:{block.line}"


def run_tenuto(words: list[str], environment: Mapping[str, str]) -> tuple[str, int]:
    before = dict(os.environ)
    os.environ.update({**ENVIRONMENT, **environment})
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main(words)
    except SystemExit as left:
        return printed.getvalue(), left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        os.environ.clear()
        os.environ.update(before)
    raise AssertionError("a command that does not leave")


UNIT = r"(?: ?(?:%|ns|us|ms|s|min|h|d|B|KiB|MiB|GiB|TiB|bytes|seconds?|minutes?|hours?|days?)\b(?:/s)?)?"


def masked(text: str) -> list[str]:
    """The lines, without what differs from one machine or moment to another."""
    text = re.sub(r"\b[0-9a-f]{12,}\b", "#", text)
    text = re.sub(rf"\b\d[\d,.:]*(?:[-–]\d+)*{UNIT}", "#", text)
    text = re.sub(r"#(?: (?:ago|#))+", "#", text)
    text = re.sub(r"[─━╌═]+", "─", text)
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if line.strip()]
