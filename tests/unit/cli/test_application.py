import importlib
import inspect
import io
import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tenuto
from tenuto import errors
from tenuto.cli import application
from tenuto.cli.console import help_text
from tenuto.cli.console.output import agreed
from tenuto.errors import NotARepository, UsageError
from tenuto.printable import clean

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-c", "from tenuto.cli import main; main()"]


def tree(kind):
    yield kind
    for below in kind.__subclasses__():
        yield from tree(below)


def test_every_error_has_a_documented_exit_status():
    assert {kind.exit_code for kind in tree(errors.TenutoError)} <= help_text.EXIT_CODES.keys()


def test_help_names_every_command_and_where_the_rest_is(cli):
    status, out, err = cli("--help")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    for name in application.COMMANDS:
        assert sum(f" {name} " in line for line in lines) >= 1
    for group in help_text.GROUPS:
        assert sum(line.startswith(f"  {group} ") for line in lines) == 1
    assert max(map(len, lines)) <= 80 and len(lines) <= 47
    assert "docs/reference/command-line.md" in out and (ROOT / "docs/reference/command-line.md").exists()


def test_the_reference_has_every_exit_status():
    page = (ROOT / "docs/reference/command-line.md").read_text()
    for code, meaning in help_text.EXIT_CODES.items():
        assert f"| {code} | {meaning} |\n" in page


@pytest.mark.parametrize("name", application.COMMANDS)
def test_the_help_of_every_command_fits_a_small_terminal(cli, name):
    status, out, _ = cli(name, "--help")
    lines = out.splitlines()
    assert status == 0
    assert f"\nExamples:\n  tenuto {name}" in out
    assert "--json" in out
    assert lines[-1].endswith("docs/reference/command-line.md")
    assert max(map(len, lines)) <= 80 and len(lines) <= 25


@pytest.mark.parametrize("name", application.COMMANDS)
def test_the_reference_has_all_of_a_commands_help(name):
    """What `--help` leaves out for want of room is there: each paragraph, option and example."""
    page = (
        (ROOT / "docs/reference/command-line.md").read_text().partition(f"## `tenuto {name}`")[2].partition("\n## ")[0]
    )
    command = importlib.import_module(f"tenuto.cli.commands.{name}")
    for example in command.EXAMPLES.splitlines():
        assert f"  {example}\n" in page
    words = " ".join(page.split())
    for paragraph in inspect.getdoc(getattr(command, name)).split("\n\n"):
        assert " ".join(paragraph.split()) in words


def test_version(cli):
    status, out, _ = cli("--version")
    assert (status, out.split()[0]) == (0, "tenuto")


def test_errors_end_with_the_hint_and_json_has_them_too(cli, tmp_path, place):
    status, out, err = cli("ls", tmp_path)
    assert (status, out) == (10, "")
    assert err == f"error: there is no Tenuto repository at {tmp_path}\nhint: there is one at /ckpts\n"
    status, out, err = cli("ls", tmp_path, "--json")
    assert err.endswith("hint: there is one at /ckpts\n")
    assert json.loads(out) == {
        "schema": "tenuto.error/1",
        "error": "NotARepository",
        "message": f"there is no Tenuto repository at {tmp_path}",
        "subject": str(tmp_path),
        "hint": "there is one at /ckpts",
        "exit_code": 10,
    }


def test_a_traceback_only_with_debug(cli, tmp_path):
    assert "Traceback" not in cli("ls", tmp_path)[2]
    assert "Traceback" in cli("ls", tmp_path, "--debug")[2]


def test_a_fault_of_ours_is_told_in_one_line(cli, made, monkeypatch):
    from tenuto.repo.repository import Repo

    monkeypatch.setattr(Repo, "open", lambda store, **_: 1 / 0)
    assert cli("ls", made) == (
        1,
        "",
        "error: a fault in Tenuto itself: ZeroDivisionError: division by zero\n"
        "hint: --debug shows where; please report it\n",
    )


def test_a_working_directory_that_has_been_removed_is_no_fault_of_ours(cli, monkeypatch, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    said = "error: the working directory has been removed\nhint: cd to a directory that exists\n"
    assert cli("run", "--", "true") == (2, "", said)
    code, _, told = cli("ls", "ckpts")
    assert code == 2 and told.startswith("error: ckpts is relative to the working directory, which has been removed\n")


def test_an_interrupt_leaves_with_130(cli, made, monkeypatch):
    from tenuto.repo.repository import Repo

    def interrupted(store, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Repo, "open", interrupted)
    assert cli("ls", made)[0] == 130


def test_a_wrong_option_leaves_with_2(cli, made):
    assert cli("ls", made, "--nope")[0] == 2
    assert cli("ls")[0] == 2


def test_looking_loads_no_framework_and_no_rich(made):
    script = (
        "import sys\nfrom tenuto.cli import main\n"
        f"for words in (['ls'], ['show', '--run', 'gpt'], ['verify'], ['--help']):\n"
        f"    try: main([*words[:1], {str(made)!r}, *words[1:]] if words[0] != '--help' else words)\n"
        "    except SystemExit as leaving: assert not leaving.code, leaving.code\n"
        "print(sorted({'torch', 'safetensors', 'rich', 'asyncio'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def on_a_terminal(words, *, answer=b"", **environment):
    """Runs the command with a terminal on all three streams; returns status and what it showed."""
    leader, follower = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")} | environment
    process = subprocess.Popen([*COMMAND, *words], stdin=follower, stdout=follower, stderr=follower, env=env)
    os.close(follower)
    os.write(leader, answer)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other end is closed: the process has ended
            break
        if not piece:
            break
        shown += piece
    os.close(leader)
    return process.wait(timeout=60), shown.decode()


def test_colour_on_a_terminal_and_none_if_asked(place):
    (place / "runs/gpt/a0001/step-00000006/manifest.json").write_bytes(b"?")
    words = ["ls", str(place)]
    assert "\x1b[31m" in on_a_terminal(words)[1]
    assert "\x1b" not in on_a_terminal(words, NO_COLOR="1")[1]


def test_rm_asks_on_a_terminal(place):
    words = ["rm", str(place), "gpt/a0001/2"]
    status, shown = on_a_terminal(words, answer=b"n\n")
    assert (status, "Remove 1 checkpoint? [y/N]" in shown, "nothing was done" in shown) == (0, True, True)
    assert (place / "runs/gpt/a0001/step-00000002/manifest.json").exists()
    status, shown = on_a_terminal(words, answer=b"y\n")
    assert (status, "1 checkpoint removed" in shown) == (0, True)
    assert not (place / "runs/gpt/a0001/step-00000002/manifest.json").exists()


def test_a_reader_that_goes_away_is_no_fault(made):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, "ls", str(made)], stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=60
    )
    os.close(writing)
    assert "Traceback" not in done.stderr
    assert "fault" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["ls"], ["ls", "--json"], ["show", "--run", "gpt"], ["verify"]])
def test_a_full_disk_under_the_output_is_said_in_one_line(made, words, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, words[0], str(made), *words[1:]],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            **{"stdout": full, "stderr": subprocess.PIPE, "text": True, "check": False, "timeout": 60},
        )
    assert done.returncode == 1
    assert "error: the output cannot be written: No space left on device" in done.stderr.splitlines()
    assert "Traceback" not in done.stderr and "fault" not in done.stderr


def test_closed_streams_are_no_fault(made):
    words = shlex.join([*COMMAND, "ls", str(made)])
    done = subprocess.run(["sh", "-c", f"{words} <&- >&-"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    words = shlex.join([*COMMAND, "rm", str(made), "gpt/a0001/2"])
    done = subprocess.run(["sh", "-c", f"{words} <&-"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "there is no terminal to ask on" in done.stderr


def test_an_ascii_terminal_gets_escapes(made):
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    script = "from tenuto.cli.console import output; import tenuto.cli.application as a; a._never_fail_to_encode(); "
    script += "output.line('caf\\u00e9 \\u2026')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=env, check=True, timeout=60)
    assert done.stdout == b"caf\\xe9 \\u2026\n"


def test_clean_escapes_controls_and_leaves_words():
    assert clean("naïve 中 a\tb") == "naïve 中 a\\tb"
    assert clean("\x1b]0;title\x07\u202e\ud800") == "\\x1b]0;title\\x07\\u202e\\ud800"


def test_nothing_waits_for_an_answer_that_cannot_come(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match="no terminal"):
        agreed("Sure?", yes=False)
    assert agreed("Sure?", yes=True)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("list", "`tenuto ls`"),
        ("info", "`tenuto show`"),
        ("delete", "`tenuto rm`"),
        ("prune", "`tenuto keep` or `tenuto gc`"),
        ("cat", "`tenuto show`"),
        ("check", "`tenuto verify`"),
        ("verfiy", "`tenuto verify` or `tenuto certify`"),
    ],
)
def test_a_command_of_another_tool_names_ours(cli, typed, meant):
    said = f"error: no command `{typed}`; did you mean {meant}?\nhint: tenuto --help\n"
    assert cli(typed, "somewhere") == (2, "", said)


def test_a_word_that_is_near_no_command_is_refused_all_the_same(cli):
    assert cli("xyzzy") == (2, "", "error: no command `xyzzy`\nhint: tenuto --help\n")


def test_a_file_for_a_repository_is_called_a_file(cli, made, tmp_path):
    (tmp_path / "train.py").write_text("")
    status, _, err = cli("ls", tmp_path / "train.py")
    assert (status, err.splitlines()) == (
        10,
        [
            f"error: {tmp_path}/train.py is a file, or lies below one; a repository is a directory",
            "hint: give the directory that training saves to",
        ],
    )
    inside = made / "runs/gpt/a0002/step-00000007/rank-00000.safetensors"
    assert cli("show", inside)[2].splitlines()[1] == "hint: tenuto ls /ckpts"
    with pytest.raises(NotARepository, match="is a file"):
        tenuto.save({"a": 1}, tmp_path / "train.py")
    with pytest.raises(NotARepository, match="is a file"):
        tenuto.Checkpointer(tmp_path / "train.py/below", {"a": 1})
