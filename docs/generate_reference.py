"""Writes docs/reference from the docstrings: `make reference`. A test asserts that the pages say what the code says.

Read with griffe, which parses the sources and imports nothing; the command line is asked for its own help.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

HERE = Path(__file__).parent / "reference"
SOURCES = Path(__file__).parents[1] / "src"
HEAD = "<!-- Generated from the docstrings by `make reference`; a change here is lost. -->\n\n"


def pages() -> dict[str, str]:
    """Every page by its name."""
    package = griffe.load("tenuto", search_paths=[SOURCES], submodules=True)
    return {
        "python.md": HEAD + "\n".join(python(package)),
        "torch.md": HEAD + "\n".join(torch(package)),
        "errors.md": HEAD + "\n".join(errors(package)),
        "events.md": HEAD + "\n".join(events(package)),
        "command-line.md": HEAD + "\n".join(command_line()),
    }


def python(package: Any) -> Iterator[str]:
    import tenuto

    yield "# `tenuto`\n"
    yield "```text\nimport tenuto\nfrom tenuto import every, keep, on\n```\n"
    homes = tenuto._HOME
    for name in [name for name in tenuto.__all__ if name != "__version__"]:
        if name in ("keep", "on"):
            yield from module(name, package[f"policy.{name}"])
            continue
        home = "policy.save" if name == "every" else homes[name].removeprefix("tenuto.")
        yield from documented(package[f"{home}.{name}"], f"tenuto.{name}", level=2)
    yield "## `tenuto.__version__`\n"
    yield "The version, a string.\n"


def torch(package: Any) -> Iterator[str]:
    yield "# `tenuto.torch`\n"
    yield f"{package['torch'].docstring.value}\n"
    yield from documented(
        package["integrations.torch.data.sampler.ResumableSampler"], "tenuto.torch.ResumableSampler", level=2
    )


def module(name: str, found: Any) -> Iterator[str]:
    yield f"## `tenuto.{name}`\n"
    yield f"{found.docstring.value}\n"
    for one in found.members.values():
        if not one.is_alias and one.is_function and not one.name.startswith("_"):
            yield from documented(one, f"{name}.{one.name}", level=3)


def documented(found: Any, name: str, *, level: int) -> Iterator[str]:
    """A class with its public methods and properties, or a function."""
    yield f"{'#' * level} `{name}`\n"
    if found.is_function:
        yield f"```text\n{signature(found, name)}\n```\n"
        yield f"{text(found)}\n"
        return
    fields = [
        one for one in found.members.values() if not one.is_alias and one.is_attribute and "property" not in one.labels
    ]
    if "__init__" in found.members:
        yield f"```text\n{signature(found.members['__init__'], name)}\n```\n"
    elif shown := [one for one in fields if one.annotation and not one.name.startswith("_")]:
        yield "```text\n" + "\n".join(f"{name}.{one.name}: {one.annotation}" for one in shown) + "\n```\n"
    yield f"{text(found)}\n"
    for one in fields if "dataclass" in found.labels else ():
        if one.docstring is not None and not one.name.startswith("_"):
            yield f"**`.{one.name}`** `{one.annotation}`\n\n{text(one)}\n"
    for one in found.members.values():
        if one.name.startswith("_") or (not one.is_function and "property" not in one.labels):
            continue
        if "property" in one.labels:
            yield f"**`.{one.name}`** `{one.annotation}`\n\n{text(one)}".rstrip() + "\n"
        else:
            yield f"**`{signature(one, '.' + one.name)}`**\n\n{text(one)}".rstrip() + "\n"


def text(found: Any) -> str:
    return inspect.cleandoc(found.docstring.value) if found.docstring is not None else ""


def signature(found: Any, name: str) -> str:
    """`name(arguments) -> type`, a line for each argument where one line does not hold them."""
    parts = []
    star = False
    for one in found.parameters:
        if one.name in ("self", "cls"):
            continue
        if one.kind is griffe.ParameterKind.keyword_only and not star:
            parts.append("*")
            star = True
        mark = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(one.kind, "")
        star = star or mark == "*"
        kind = f": {one.annotation}" if one.annotation is not None else ""
        default = f" = {one.default}" if one.default is not None and not mark else ""
        parts.append(f"{mark}{one.name}{kind}{default}")
    back = f" -> {found.returns}" if found.returns is not None and found.name != "__init__" else ""
    line = f"{name}({', '.join(parts)}){back}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){back}"


def errors(package: Any) -> Iterator[str]:
    from tenuto import errors as tree

    yield "# `tenuto.errors`\n"
    drawn, _, rest = package["errors"].docstring.value.partition("\n\nEach error")
    title, _, drawing = drawn.partition("\n\n")
    yield f"{title}\n\n```text\n{drawing}\n```\n\nEach error{rest}\n"
    yield "| error | exit status |\n|---|---|"
    for name, found in package["errors"].members.items():
        if not found.is_alias and found.is_class and issubclass(getattr(tree, name), tree.TenutoError):
            yield f"| `{name}` | {getattr(tree, name).exit_code} |"
    yield "\n`tenuto.Preempted` is no error: it is the SystemExit of a training that a signal asked to leave.\n"


def events(package: Any) -> Iterator[str]:
    from tenuto import events as told
    from tenuto import telemetry

    yield "# `tenuto.events` and `tenuto.telemetry`\n"
    yield f"{package['telemetry'].docstring.value}\n\nA sink is given as `sinks=[…]`; `emit` gets each event.\n"
    for name in telemetry.__all__:
        home = getattr(telemetry, name).__module__.removeprefix("tenuto.")
        yield from documented(package[f"{home}.{name}"], f"tenuto.telemetry.{name}", level=2)
    yield from documented(package["events.Sink"], "tenuto.events.Sink", level=2)
    for name, found in package["events"].members.items():
        if not found.is_alias and found.is_class and issubclass(getattr(told, name), told.Event):
            yield from documented(found, f"tenuto.events.{name}", level=2)


def command_line() -> Iterator[str]:
    import typer

    from tenuto.cli.application import COMMANDS, application
    from tenuto.cli.console import help_text

    yield "# `tenuto`, the command\n"
    yield "Data goes to stdout, the story to stderr, a hint comes last. `--json` gives one JSON document, also for an"
    yield "error, whose `schema` names its kind and version.\n"
    whole: Any = typer.main.get_command(application())
    for name in COMMANDS:
        command = whole.commands[name]
        context = command.make_context(f"tenuto {name}", [], resilient_parsing=True, terminal_width=100, color=False)
        words = re.sub(r"[ \t]+$", "", command.complete_help(context, 98), flags=re.M)
        yield f"## `tenuto {name}`\n\n```text\n{textwrap.dedent(words).strip()}\n```\n"
    yield "## Exit status\n\n| status | means |\n|---|---|"
    for code, meaning in help_text.EXIT_CODES.items():
        yield f"| {code} | {meaning} |"
    yield ""


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, page in pages().items():
        (HERE / name).write_text(page)
