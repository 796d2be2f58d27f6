"""Every key of `tenuto.toml`: what its value is, its default, its unit, the argument that it stands for, and why.

Names are those of the arguments wherever one key stands for one argument. `docs/reference/settings.md` is made from
this table, and a test compares it with the signatures. No key holds a secret: credentials come from where a service's
own tools have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from tenuto.model.sizes import parse_bytes, parse_rate, parse_time
from tenuto.policy.numbers import duration, margin, whole_number
from tenuto.policy.save import stall_share
from tenuto.record import record

LEAST_SIZE: Final = 1 << 20
"""Bytes. Below it a size is one whose unit was forgotten: no checkpoint, cache or part is useful with less."""


@record
class Kind:
    """What a value has to be. `read` returns what code would say, and raises ValueError for anything else; `example`
    is a value as the file has it."""

    name: str
    example: str
    read: Callable[[object], object]
    is_text: bool = False
    """Whether an environment variable holds the text itself, not a TOML value."""
    is_path: bool = False
    """Whether a relative one begins in the directory of the file."""


@record
class Key:
    """One key. argument: `Class.argument` or `function.argument` that it stands for, several divided by a space."""

    name: str
    kind: Kind
    argument: str
    about: str
    reason: str
    """Why this default."""
    default: str = ""
    """As the file would have it; empty where leaving the key out is a choice of its own, which `reason` explains."""
    unit: str = ""
    required: bool = False


@record
class Table:
    """A table of keys; `many`: an array of such tables, or one alone. default: what leaving it out means."""

    name: str
    keys: tuple[Key | Table, ...]
    argument: str
    about: str
    default: str
    many: bool = False


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError
    return value


def _place(value: object) -> str | list[str]:
    if isinstance(value, list) and value:
        return [_text(one) for one in value]
    return _text(value)


def _texts(value: object) -> list[str]:
    if not isinstance(value, list) or not value:
        raise ValueError
    return [_text(one) for one in value]


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError
    return value


def _at_least(least: int, parse: Callable[[Any], int], value: object) -> int:
    number = parse(value)
    if number < least:
        raise ValueError
    return number


def _span(value: object) -> int | bool:
    return value if isinstance(value, bool) else whole_number(value, "{}")


def _start(value: object) -> int | str | None:
    if value is False:
        return None
    return _text(value) if isinstance(value, str) else _integer(value)


def _checked(check: Callable[[Any], object], value: object) -> object:
    """Returns `value` as it is written, once `check` accepts it."""
    check(value)
    return value


def _limit(value: object) -> str:
    text = _text(value)
    if text != "off":
        parse_time(text)
    return text


def _one_of(*known: str) -> Kind:
    def read(value: object) -> object:
        if value not in known:
            raise ValueError
        return value

    *first, last = (f'"{one}"' for one in known)
    name = f"{', '.join(first)} or {last}" if first else last
    return Kind(name, f'"{known[0]}"', read, is_text=True)


ENCODING: Final = _one_of("plain", "dedupe", "auto", "small")
TEXT: Final = Kind("text", '"main"', _text, is_text=True)
PLACE: Final = Kind("a path, a URL or a list of them", '"/shared/ckpts"', _place, is_text=True, is_path=True)
TEXTS: Final = Kind("a list of texts", '["hung=stop"]', _texts)
PATH: Final = Kind("a path", '"/nvme/cache"', _text, is_text=True, is_path=True)
FLAG: Final = Kind("true or false", "true", _flag)
COUNT: Final = Kind("a whole number of at least 1", "3", lambda value: whole_number(value, "{}"))
INTEGER: Final = Kind("a whole number", "3", _integer)
NUMBER: Final = Kind("a number above zero", "10", lambda value: duration(value, "{}"))
SIZE: Final = Kind("a size with its unit, 1 MiB or more", '"500GB"', partial(_at_least, LEAST_SIZE, parse_bytes), True)
RATE: Final = Kind("a rate with its unit, 1 kB/s or more", '"200MB/s"', partial(_at_least, 1000, parse_rate), True)
LIMIT: Final = Kind('a time with its unit, or "off"', '"30m"', _limit, is_text=True)
SHARE: Final = Kind("a share of time, up to half", '"1%"', partial(_checked, stall_share))
MARGIN: Final = Kind("a number or a percentage", '"5%"', partial(_checked, partial(margin, call="{}", least="zero")))
SPAN: Final = Kind("a whole number, or true for good", "14", _span)
START: Final = Kind("text, a step or false", '"latest"', _start)
MODE: Final = _one_of("min", "max")
EVENT: Final = _one_of("attempt", "fork", "rollback")


def interval(section: str) -> tuple[Key, ...]:
    """Returns the keys that say how often; several mean whichever comes first."""
    none = f"Without any interval, only what else `{section}` names."
    return (
        Key("steps", COUNT, "every.steps", "Every so many completed steps.", none, unit="steps"),
        Key("minutes", NUMBER, "every.minutes", "Every so many minutes since the last one.", none, unit="minutes"),
        Key("hours", NUMBER, "every.hours", "The same in hours.", none, unit="hours"),
        Key("epochs", COUNT, "every.epochs", "At the end of every so many epochs.", none, unit="epochs"),
    )


def retention() -> tuple[Key | Table, ...]:
    none = "Each key adds to what is kept; what none names goes."
    limit = "Without one, what the other keys keep may take any room."
    return (
        Key("latest", COUNT, "keep.latest.n", "The newest so many.", none, unit="checkpoints"),
        Table(
            "best",
            (
                Key("metric", TEXT, "keep.best.metric", "The metric.", "Only you know it.", required=True),
                Key("n", COUNT, "keep.best.n", "How many.", "The best one is what most want.", "1", "checkpoints"),
                Key(
                    "mode",
                    MODE,
                    "keep.best.mode",
                    "Which is best: the lowest or the highest.",
                    "A loss falls.",
                    '"min"',
                ),
            ),
            "keep.best",
            "The best by a metric, for one metric or several.",
            "none",
            many=True,
        ),
        Key("every_steps", COUNT, "keep.every.steps", "The first of each so many steps, for good.", none, unit="steps"),
        Key("every_hours", NUMBER, "keep.every.hours", "The first of each so many hours.", none, unit="hours"),
        Key("within_hours", NUMBER, "keep.within.hours", "All of the last so many hours.", none, unit="hours"),
        Key("within_days", NUMBER, "keep.within.days", "All of the last so many days.", none, unit="days"),
        Key("within_weeks", NUMBER, "keep.within.weeks", "All of the last so many weeks.", none, unit="weeks"),
        Key("hourly", SPAN, "keep.hourly.hours", "The first of each hour, of the last so many.", none, unit="hours"),
        Key("daily", SPAN, "keep.daily.days", "The first of each day, of the last so many days.", none, unit="days"),
        Key("weekly", SPAN, "keep.weekly.weeks", "The first of each week, of the last so many.", none, unit="weeks"),
        Key("monthly", SPAN, "keep.monthly.months", "The first of each month, of the last so many.", none,
            unit="months"),
        Key("yearly", SPAN, "keep.yearly.years", "The first of each year, of the last so many.", none, unit="years"),
        Key("after", EVENT, "keep.after.event", "The first of each attempt, or after each fork or rollback.", none),
        Key("all", FLAG, "keep.all", "Everything, for good.", "It fills any disk in the end.", "false"),
        Key("budget", SIZE, "keep.limit.bytes", "Of all that, only what fits; alone: of everything.", limit,
            unit="bytes"),
        Key("cost", NUMBER, "keep.limit.cost", "The same in money: what it may cost in a month.", limit,
            unit="any currency"),
        Key("cost_per_gib_month", NUMBER, "keep.limit.per_gib_month", "What a GiB costs in a month.",
            "Only you know it.", unit="the same currency"),
    )  # fmt: skip


def improvement(function: str, about: str, *more: Key, required: bool) -> Table:
    metric = Key("metric", TEXT, f"on.{function}.metric", "The metric.", "Only you know it.", required=True)
    least = "Any improvement counts." if not required else "A drop has to be large enough to be worth a save."
    default = "" if required else "0"
    by = Key("by", MARGIN, f"on.{function}.by", "By how much, or by what part.", least, default, required=required)
    return Table(function, (metric, *more, by), f"on.{function}", about, "none", many=True)


CACHE: Final = Table(
    "cache",
    (
        Key("directory", PATH, "Cached.directory", "Where copies lie.", "A fast local disk.", required=True),
        Key("limit", SIZE, "Cached.limit", "How much they take.", "A few checkpoints.", '"50GB"', "bytes"),
    ),
    "Cached",
    "Keeps what is read on a local disk, for all processes of a node.",
    "no cache",
)
PART: Final = Key(
    "part", SIZE, "Stripe.part", 'Bytes in a row in each location, with kind = "stripe".',
    "Long enough for a disk's full rate, short enough that a piece of a save has one for each.", '"4MiB"', "bytes",
)  # fmt: skip

TIERS: Final = Table(
    "tiers",
    (
        Key("where", PLACE, "Tier.where", "The location of this tier.", "Only you know it.", required=True),
        Key("name", TEXT, "Tier.name", "What messages call it.", "By default its location."),
        Key("kind", _one_of("stripe"), "Stripe", "With a list as `where`.", "One location needs none."),
        PART,
        CACHE,
        Key("per_node", FLAG, "Tier.per_node", "Each node has its own.", "Most locations are shared.", "false"),
        Table("save", interval("save")[:3], "Tier.save", "Which saves it gets.", "all saves"),
        Table("keep", retention(), "Tier.keep", "What it keeps.", "what the run keeps"),
        Key("capacity", SIZE, "Tier.capacity", "How much it holds; older ones that a slower tier has go first.",
            "Without it, what is free limits it.", unit="bytes"),
        Key("wait", FLAG, "Tier.wait", "Whether a save counts only once it is here.",
            "The first tier is waited for; the others are filled in the background."),
        Key("bandwidth", RATE, "Tier.bandwidth", "The most that is written to it.",
            "Without it, as fast as it takes; a limit leaves a shared network to training.", unit="bytes/s"),
    ),
    "Tiers",
    "The locations of one repository, fastest first, instead of `where`.",
    "none: one location, where",
    many=True,
)  # fmt: skip

KEYS: Final[tuple[Key | Table, ...]] = (
    Key("where", PLACE, "Checkpointer.where", "Where checkpoints lie; a list with `kind`.", "Only you know it."),
    Key("kind", _one_of("mirror", "stripe"), "Mirror Stripe",
        "What a list is: each file in all (mirror), or its parts spread over all (stripe).",
        "One location needs none."),
    PART,
    Key("copies", COUNT, "Tiers.copies Mirror.copies", "In how many waiting locations a data file is at a commit.",
        "All of them: what fails later loses nothing.", unit="locations"),
    Key("node", TEXT, "Tiers.node", "The name of this node, for tiers that are per_node.",
        "By default the host's name."),
    Key("run", TEXT, "Checkpointer.run", "The name of this training.", "Most repositories have one.", '"main"'),
    Key("resume_from", START, "Checkpointer.resume_from",
        "Where to start: latest, a step, a tag, best:METRIC, or false: afresh.",
        "A start resumes unless told otherwise.", '"latest"'),
    Key("in_flight", COUNT, "Checkpointer.in_flight", "Saves in progress at once.",
        "Each takes the state's size in memory.", "1", "saves"),
    Key("on_busy", _one_of("wait", "skip"), "Checkpointer.on_busy",
        "What becomes of a save that is due meanwhile: it waits or is skipped.",
        "No save is lost.", '"wait"'),
    Key("on_error", _one_of("warn", "raise"), "Checkpointer.on_error", "What a failed save does: warn, or also raise.",
        "Training is worth more than one save.", '"warn"'),
    Key("takeover", FLAG, "Checkpointer.takeover", "Claim the run from a live process.",
        "Two trainings of one run spoil each other; for one start, set it in the environment.", "false"),
    Key("wait_for_owner", NUMBER, "Checkpointer.wait_for_owner", "How long to wait for a process that owns the run.",
        "By default seconds for a process of this host, a minute for another.", unit="seconds"),
    Key("memory_budget", SIZE, "Checkpointer.memory_budget", "Host memory that saving may use.",
        "Without it, what `in_flight` and `memory` need.", unit="bytes"),
    Key("encoding", ENCODING, "Checkpointer.encoding",
        "How bytes are stored: as they are, only what is new, compressed where that is faster, or as small as can be.",
        "Every tool reads plain files; the others save space.", '"plain"'),
    Key("key", TEXT, "Checkpointer.key", "The key file of a sealed repository, or env:NAME, never the key itself.",
        "By default what the environment has."),
    Key("capture", _one_of("eager", "fenced"), "Checkpointer.capture",
        "How the state is copied: at once, or during the next step.",
        "Eager holds for any code; fenced blocks training for less.", '"eager"'),
    Key("health", FLAG, "Checkpointer.health", "Whether saves look at values: NaN, infinities, norms.",
        "A broken checkpoint is never best, nor the only one that is kept.", "true"),
    Key("on_unhealthy", _one_of("stop"), "Checkpointer.on_unhealthy",
        "What happens when values become NaN or a loss diverges: training stops.",
        "By default a warning; in Python also a function."),
    Key("ranks_timeout", NUMBER, "Checkpointer.ranks_timeout", "How long ranks wait for a late one.",
        "Longer than any step or restore.", "600.0", "seconds"),
    Key("ranks_silence", NUMBER, "Checkpointer.ranks_silence", "Silence after which a rank is lost.",
        "A dead host is noticed soon, a busy one has time.", "15.0", "seconds"),
    Key("writers", _one_of("balanced", "tensor", "layer", "size", "one"), "Checkpointer.writers",
        "Which ranks write what several have.", "All write equally much.", '"balanced"'),
    Key("emergency", PLACE, "Checkpointer.emergency",
        "Where the last state goes if its own store does not take it at the end; several are tried in order.",
        "Only you know another disk."),
    Key("emergency_after", NUMBER, "Checkpointer.emergency_after",
        "Without progress for so long, the own store does not answer.",
        "Half of a usual time to leave is left for the emergency place.", "10.0", "seconds"),
    Key("log", _one_of("default", "saves", "silent"), "Checkpointer.log", "Which lines Tenuto prints.",
        "What happened to data or time, and no routine.", '"default"'),
    Key("save_top_k", INTEGER, "Checkpointer.save_top_k", "As in Lightning, instead of `keep`.", "`keep` says more."),
    Key("monitor", TEXT, "Checkpointer.monitor", "The metric of save_top_k.", "`keep.best` says more."),
    Key("mode", MODE, "Checkpointer.mode", "The direction of monitor.", "`keep.best` says more."),
    Key("save_last", FLAG, "Checkpointer.save_last", "Keep the last one too.", "`keep.latest` says more."),
    Key("max_to_keep", COUNT, "Checkpointer.max_to_keep", "As in Orbax, instead of `keep`.", "`keep.latest` says it."),
    Table(
        "save",
        (
            *interval("save"),
            Key("stall", SHARE, "every.stall", "As often as saves block training for this share of time.",
                "An interval is easier to foresee."),
            Key("auto", SHARE, "every.auto", "As often as loses least, blocking training for at most this share.",
                "An interval is easier to foresee."),
            Key("mtbf_hours", NUMBER, "every.mtbf_hours", "For `auto`: hours between failures.",
                "The run's own failures show it.", unit="hours"),
            improvement("improve", "When a metric is better than ever.",
                        Key("mode", MODE, "on.improve.mode", "Better is lower or higher.", "A loss falls.", '"min"'),
                        required=False),
            improvement("drop", "When a metric is lower than at the last save.", required=True),
            Key("end", FLAG, "on.end", "At the end of training.", "The last state is the result.", "true"),
            Key("signal", FLAG, "on.signal", "When a signal asks the process to leave.",
                "Preemption then costs nothing.", "true"),
        ),
        "Checkpointer.save",
        "When to save.",
        "every 10 minutes, at the end, on a signal",
    ),
    Table("keep", retention(), "Checkpointer.keep", "What to keep.", "the newest 3"),
    Table("memory", interval("memory"), "Checkpointer.memory", "When the state is sealed in memory too.", "never"),
    CACHE,
    TIERS,
    Table(
        "sinks",
        (
            Key("json_lines", PATH, "JsonLines.target", "Appends each event to this file.",
                "No file unless asked for."),
            Key("progress", FLAG, "ProgressBar", "A bar on stderr for long saves and restores.",
                "Most output goes to files.", "false"),
            Key("logging", FLAG, "LogSink", "Events go to the logger `tenuto`, instead of lines.",
                "Lines need no configuration.", "false"),
        ),
        "Checkpointer.sinks",
        "What receives events.",
        "none",
    ),
    Table(
        "supervise",
        (
            Key("on", TEXTS, "run.--on",
                "What is done about each cause of an end, `CAUSE=HOW` or `CAUSE=HOW:N`, and finding: `FINDING=ACTION`.",
                "Each has one that suits most trainings."),
            Key("notify", TEXTS, "run.--notify", "Whom to tell: URLs as apprise has them, or `env:NAME`.",
                "No messages unless asked for; tokens belong into the environment."),
            Key("start_within", LIMIT, "run.--start-within", "To the first step, else it counts as hung.",
                "What is restored is read by then.", '"2h"'),
            Key("end_within", LIMIT, "run.--end-within", "From the last step to the end, else it counts as hung.",
                "By default an hour for what is saved, and no limit for what the script does after that."),
            Key("notices", _one_of("auto", "off", "aws", "gcp", "azure"), "run.--notices",
                "Whose notices of preemption are read.", "The machine's firmware names its cloud.", '"auto"'),
            Key("record", PATH, "run.--record", "Appends what is read of the machine to this file.",
                "No file unless asked for."),
            Key("risk", TEXT, "run.--risk", "What foresees faults: `rules`, `off`, or a model's file.",
                "Rules need no training.", '"rules"'),
        ),
        "run",
        "What `tenuto run` does, where its options do not say.",
        "none",
    ),
)  # fmt: skip


def named(keys: Sequence[Key | Table], name: str) -> Key | Table | None:
    return next((key for key in keys if key.name == name), None)


def flat(keys: Sequence[Key | Table] = KEYS, above: str = "") -> Iterator[tuple[str, Key | Table]]:
    """Yields every key and table with its whole name, such as `save.steps`."""
    for key in keys:
        yield f"{above}{key.name}", key
        if isinstance(key, Table):
            yield from flat(key.keys, f"{above}{key.name}.")
