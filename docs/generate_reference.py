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
from reference_examples import EXAMPLES  # beside this file

HERE = Path(__file__).parent / "reference"
SOURCES = Path(__file__).parents[1] / "src"
HEAD = "<!-- Generated from the docstrings by `make reference`; a change here is lost. -->\n\n"


GROUPS = {
    "training.md": (
        "Train, and resume",
        "The Checkpointer, when it saves, what it keeps, and what it reports.",
        [
            "Checkpointer",
            "every",
            "on",
            "keep",
            "late",
            "Save",
            "Stats",
            "Timing",
            "RankTimings",
            "Preempted",
            "Unhealthy",
            "restart",
            "Restart",
            "Encoding",
        ],
    ),
    "save-and-load.md": (
        "Save and load",
        "One checkpoint, without a training loop around it.",
        ["save", "load", "Restored", "Checkpoint", "register", "Tagged", "__version__"],
    ),
    "look-inside.md": (
        "Look inside",
        "What is there, and the tensors of one checkpoint, without restoring it.",
        ["Repository", "open", "Opened"],
    ),
    "ranks.md": (
        "Many GPUs",
        "What several processes hold, where torch does not say it, and how they meet.",
        ["shard", "fused", "flat", "per_rank", "replicated", "first_rank", "declare", "SharedFiles", "Solo"],
    ),
    "places.md": (
        "Several locations",
        "A repository in tiers, on the disk of each node, in several copies, over several mounts, or behind a cache. "
        "Pass one wherever a path goes.",
        ["Tiers", "Tier", "PerNode", "Mirror", "Stripe", "Cached"],
    ),
}
"""The names of `tenuto` by task; each page's title and first sentence. Errors have a page of their own."""

HIDDEN = {
    "Checkpoint.__init__", "Opened.__init__", "Opened.node", "Opened.specs", "Preempted.__init__",
    "RankTimings.__init__", "RankTimings.of", "RankTimings.of_parts", "RankTimings.read", "RankTimings.to_json",
    "Repository.manifest", "Repository.notes", "Restored.__init__", "Restored.of",
    "Restart.__init__", "Restart.variables",
    "Save.__init__", "Save.begin", "Save.end", "Save.moved_s", "Save.moves", "Save.stuck", "Save.wait_behind",
    "keep.protections", "keep.recorded",
    "SharedFiles.is_coordinator", "SharedFiles.kv_store", "Solo.__init__", "Solo.kv_store",
    "telemetry.JsonLines.emit", "telemetry.LogSink.emit", "telemetry.ProgressBar.emit",
    "Tiers.home_tier", "Tiers.slower", "Stats.__init__", "Timing.__init__", "Timing.read", "Timing.to_json",
    *(f"{place}.{method}" for place in ("Stripe", "Cached") for method in (
        "url", "capabilities", "probe", "put_if_absent", "open", "get", "stat", "children", "walk", "delete", "settle",
        "free_bytes", "close",
    )), "Cached.holds",
}  # fmt: skip
"""Public in Python, and for Tenuto's own use: they take or give what only the engine has."""

OF_ERRORS = ("TenutoError", "TenutoWarning")


class RecordsAreDataclasses(griffe.Extension):
    """`@record` is read as the `@dataclass` that it makes."""

    def on_class_instance(self, *, cls: Any, **_: Any) -> None:
        for decorator in cls.decorators:
            if str(decorator.value).partition("(")[0] == "record":
                decorator.value = griffe.ExprName("dataclasses.dataclass")
                cls.labels.add("dataclass")


def pages() -> dict[str, str]:
    """Every page by its name."""
    package = griffe.load(
        "tenuto", search_paths=[SOURCES], submodules=True, extensions=griffe.load_extensions(RecordsAreDataclasses)
    )
    return {
        "README.md": HEAD + "\n".join(contents(package)),
        **{name: HEAD + "\n".join(group(package, *about)) for name, about in GROUPS.items()},
        "torch.md": HEAD + "\n".join(torch(package)),
        "errors.md": HEAD + "\n".join(errors(package)),
        "logging.md": HEAD + "\n".join(sinks(package)),
        "events.md": HEAD + "\n".join(events(package)),
        "settings.md": HEAD + "\n".join(settings()),
        "command-line.md": HEAD + "\n".join(command_line()),
    }


def contents(package: Any) -> Iterator[str]:
    """Every name, with the first sentence of what it is."""
    yield "# Reference\n\nEverything that is public, by task. `import tenuto` loads no framework.\n"
    for page, (title, sentence, names) in GROUPS.items():
        yield f"## [{title}]({page})\n\n{sentence}\n\n| name | |\n|---|---|"
        for name in names:
            yield f"| [`tenuto.{name}`]({page}#tenuto{name.lower()}) | {first_sentence(package, name)} |"
        yield ""
    yield "## More\n\n| page | |\n|---|---|"
    yield "| [`tenuto.torch`](torch.md) | a sampler whose order no number of ranks changes |"
    yield "| [`tenuto.errors`](errors.md) | the tree of errors, and the exit status of each |"
    yield "| [`tenuto.telemetry`](logging.md) | sinks: logging, a progress bar, JSON lines |"
    yield "| [`tenuto.events`](events.md) | what sinks receive |"
    yield "| [`tenuto.toml`](settings.md) | every key of the settings file |"
    yield "| [`tenuto`](command-line.md) | the command, its options and exit statuses |\n"


def first_sentence(package: Any, name: str) -> str:
    if name == "__version__":
        return "The version, a string."
    paragraph = text(found_at(package, name)).partition("\n\n")[0].partition("\n- ")[0].replace("\n", " ")
    return re.split(r"(?<=[.:]) (?=[A-Z`])", paragraph)[0].rstrip(":.") + "."


def found_at(package: Any, name: str) -> Any:
    import tenuto

    if name in ("keep", "on"):
        return package[f"policy.{name}"]
    home = "policy.save" if name == "every" else tenuto._HOME[name].removeprefix("tenuto.")
    return package[f"{home}.{name}"]


def group(package: Any, title: str, sentence: str, names: list[str]) -> Iterator[str]:
    yield f"# {title}\n\n{sentence}\n"
    for name in names:
        if name == "__version__":
            yield "## `tenuto.__version__`\n\nThe version, a string.\n"
        elif name in ("keep", "on"):
            yield from module(name, found_at(package, name))
        else:
            yield from documented(found_at(package, name), f"tenuto.{name}", level=2)


def torch(package: Any) -> Iterator[str]:
    yield "# `tenuto.torch`\n"
    yield f"{package['torch'].docstring.value}\n"
    yield from documented(
        package["integrations.torch.data.sampler.ResumableSampler"], "tenuto.torch.ResumableSampler", level=2
    )
    yield from documented(package["integrations.torch.data.resumable.resumable"], "tenuto.torch.resumable", level=2)


def module(name: str, found: Any) -> Iterator[str]:
    yield f"## `tenuto.{name}`\n"
    yield f"{found.docstring.value}\n"
    yield from example(f"tenuto.{name}")
    for one in found.members.values():
        if one.is_alias or not one.is_function or one.name.startswith("_"):
            continue
        if f"{name}.{one.name}" not in HIDDEN:
            yield from documented(one, f"{name}.{one.name}", level=3)


def example(name: str) -> Iterator[str]:
    if name in EXAMPLES:
        yield f"```python\n{EXAMPLES[name].strip()}\n```\n"


def documented(found: Any, name: str, *, level: int) -> Iterator[str]:
    """A class with its public methods and properties, or a function."""
    mark = "#" * level
    short = name.removeprefix("tenuto.")
    yield f"{mark} `{name}`\n"
    if found.is_function:
        yield f"```py\n{signature(found, name)}\n```\n"
        yield f"{text(found)}\n"
        yield from example(name)
        return
    fields = [
        one
        for one in found.members.values()
        if not one.is_alias and one.is_attribute and "property" not in one.labels and not one.name.startswith("_")
    ]
    if "__init__" in found.members and f"{short}.__init__" not in HIDDEN:
        yield f"```py\n{signature(found.members['__init__'], name)}\n```\n"
    elif "__init__" not in found.members and (shown := [one for one in fields if one.annotation]):
        yield "```py\n" + "\n".join(f"{name}.{one.name}: {one.annotation}" for one in shown) + "\n```\n"
    yield f"{text(found)}\n"
    yield from example(name)
    hidden = f"{short}.__init__" in HIDDEN
    if "dataclass" in found.labels and (listed := [one for one in fields if hidden or one.docstring is not None]):
        yield "| field | |\n|---|---|"
        for one in listed:
            kind = str(one.annotation).replace("|", "\\|")
            yield f"| `{one.name}`: `{kind}` | {' '.join(text(one).split())} |"
        yield ""
    # What a class of ours takes over from another of ours that has no page of its own.
    taken_over = found.inherited_members.values() if short == "Repository" else ()
    for one in (*found.members.values(), *taken_over):
        if one.name.startswith("_") or f"{short}.{one.name}" in HIDDEN:
            continue
        if "property" in one.labels:
            yield f"{mark}# `{short}.{one.name}`\n\n`{one.annotation}`\n\n{text(one)}".rstrip() + "\n"
        elif one.is_function:
            yield (
                f"{mark}# `{short}.{one.name}`\n\n```py\n{signature(one, one.name)}\n```\n\n{text(one)}".rstrip() + "\n"
            )


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
    yield from example("tenuto.errors")
    yield "| error | exit status |\n|---|---|"
    for name, found in package["errors"].members.items():
        if not found.is_alias and found.is_class and issubclass(getattr(tree, name), tree.TenutoError):
            yield f"| `{name}` | {getattr(tree, name).exit_code} |"
    yield "\n`tenuto.Preempted` is not an error: it is the SystemExit of a training that a signal asked to leave.\n"
    for name in OF_ERRORS:
        if name in package["errors"].members:
            yield f"## `tenuto.{name}`\n\n{text(package['errors'][name])}\n"


def sinks(package: Any) -> Iterator[str]:
    from tenuto import telemetry

    yield "# `tenuto.telemetry`\n"
    yield f"{package['telemetry'].docstring.value}\n"
    yield "A sink is given as `sinks=[…]`; it receives each [event](events.md).\n"
    yield from example("tenuto.telemetry")
    for name in telemetry.__all__:
        home = getattr(telemetry, name).__module__.removeprefix("tenuto.")
        yield from documented(package[f"{home}.{name}"], f"tenuto.telemetry.{name}", level=2)
    yield from documented(package["events.Sink"], "tenuto.events.Sink", level=2)


def events(package: Any) -> Iterator[str]:
    from tenuto import events as told

    yield "# `tenuto.events`\n\nWhat sinks receive, each a dataclass that type checkers take for frozen.\n"
    yield from example("tenuto.events")
    for name, found in package["events"].members.items():
        if not found.is_alias and found.is_class and issubclass(getattr(told, name), told.Event):
            yield from documented(found, f"tenuto.events.{name}", level=2)


def settings() -> Iterator[str]:
    """Every key of the settings file, from its own table."""
    from tenuto.training.config.keys import KEYS, Key, Table, flat

    yield "# `tenuto.toml`\n"
    yield "The keys of the [settings file](../guides/settings.md), for `Checkpointer.from_config`. A key that is left"
    yield "out has its default. `TENUTO_` and the key in capitals, `__` for a dot, is the variable that overrides it:"
    yield "`TENUTO_SAVE__STEPS=200`, `TENUTO_TIERS__NVME__CAPACITY=1TB` (a tier by its name, or its number from 0)."
    yield "Text is written without quotes there, anything else as in the file.\n"

    def rows(keys: Any) -> Iterator[str]:
        yield "| key | value | unit | default | what, and why this default |\n|---|---|---|---|---|"
        for key in keys:
            default = "required" if key.required else f"`{key.default}`" if key.default else ""
            value = key.kind.name.replace("|", "\\|")
            yield f"| `{key.name}` | {value} | {key.unit} | {default} | {key.about} {key.reason} |"
        yield ""

    yield from rows(key for key in KEYS if isinstance(key, Key))
    for name, table in flat():
        if isinstance(table, Table):
            head = f"[[{name}]]" if table.many else f"[{name}]"
            yield f"## `{head}`\n\n{table.about} Left out: {table.default}.\n"
            yield from rows(key for key in table.keys if isinstance(key, Key))


def command_line() -> Iterator[str]:
    import typer

    from tenuto.cli.application import COMMANDS, application
    from tenuto.cli.console import help_text

    yield "# `tenuto`, the command\n"
    yield "Data goes to stdout, messages go to stderr, a hint comes last. `--json` gives one JSON document, also for an"
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
    for stale in {path.name for path in HERE.glob("*.md")} - set(pages()):
        (HERE / stale).unlink()
    for name, page in pages().items():
        (HERE / name).write_text(page)
