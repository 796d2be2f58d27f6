"""The formats that are known, and how a file or directory of one is recognised: by its content, else by its name.

Nothing of a format is imported before a file of it is met. Another package declares a format with an entry point in the
group `tenuto.formats` whose value is a `Format`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from tenuto.errors import MissingExtra, StoreError, UsageError, install, nearest, typed
from tenuto.formats.contract import Content, Reader
from tenuto.record import record
from tenuto.regular_files import opener, strange

GROUP: Final = "tenuto.formats"


@record
class Format:
    """A format of checkpoints.

    name: as `--to` and `--from` take it. title: in lists and errors.
    module: has `read(path)` if `reads`, and `write(part, content)` if `writes` (see `contract`).
    detects: whether what lies at a path, which exists, is of this format. Looks at names and a few bytes; never raises
        for what is something else.
    suffixes: of files that are written in it; the first one is the usual one. None of a directory.
    directory: whether one checkpoint is a directory.
    names: of all that a directory which is written in it holds, as patterns; nested: directories among them. --force
        replaces a directory that holds nothing else.
    extra: Tenuto's extra with the packages that the module needs.
    """

    name: str
    title: str
    module: str
    detects: Callable[[Path], bool]
    suffixes: tuple[str, ...] = ()
    directory: bool = False
    names: tuple[str, ...] = ()
    nested: bool = False
    extra: str = ""
    reads: bool = True
    writes: bool = False

    def read(self, path: Path) -> Reader:
        """Opens a checkpoint of this format. UsageError if it can only be written; MissingExtra names what it needs."""
        if not self.reads:
            raise UsageError(
                f"{path} is {self.title}, which Tenuto writes and does not read",
                subject=str(path),
                hint=f"formats that it reads: {', '.join(one.name for one in formats() if one.reads)}",
            )
        return cast(Reader, self._ability("read", path)(path))

    def write(self, part: Path, content: Content) -> list[str]:
        """Writes a file or directory of this format. Raises as `read` does."""
        if not self.writes:
            raise UsageError(
                f"Tenuto reads {self.title} and does not write it",
                subject=self.name,
                hint=f"formats that it writes: {', '.join(one.name for one in formats() if one.writes)}",
            )
        return cast(list[str], self._ability("write", part)(part, content))

    def _ability(self, name: str, path: Path) -> Any:
        try:
            return getattr(importlib.import_module(self.module), name)
        except ImportError as error:
            if not self.extra:
                raise
            raise MissingExtra(
                f"{self.title} needs {error.name}, which is not installed", subject=str(path), hint=install(self.extra)
            ) from error


def begins_with(*heads: bytes) -> Callable[[Path], bool]:
    """Returns a `detects` for files with these first bytes."""

    def detects(path: Path) -> bool:
        return path.is_file() and head(path, max(map(len, heads))).startswith(heads)

    return detects


def holds(*patterns: str) -> Callable[[Path], bool]:
    """Returns a `detects` for directories in which each of these patterns names a file."""

    def detects(path: Path) -> bool:
        return path.is_dir() and all(any(path.glob(pattern)) for pattern in patterns)

    return detects


def head(path: Path, length: int) -> bytes:
    """Returns the first bytes of a file; none where it cannot be read."""
    try:
        with open(path, "rb", opener=opener) as file:
            return file.read(length)
    except OSError:
        return b""


def _is_safetensors(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("*.safetensors"))
    if path.name.endswith(".safetensors.index.json"):
        return True
    start = head(path, 9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < 1 << 27


def _is_hugging_face(path: Path) -> bool:
    """A directory of a model, an adapter, or a checkpoint of a Trainer."""
    if not path.is_dir() or not any((path / one).is_file() for one in HUGGING_FACE):
        return False
    weights = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
    return any(any(path.glob(one)) for one in weights)


HUGGING_FACE: Final = ("config.json", "adapter_config.json", "trainer_state.json")
"""One of these says that a directory is of Hugging Face's tools."""


def _is_orbax(path: Path) -> bool:
    """One item, a step with its items, or a CheckpointManager's directory with its steps."""
    return path.is_dir() and any(
        next(path.glob(f"{above}{name}"), None) is not None
        for above in ("", "*/", "*/*/")
        for name in ("_METADATA", "_CHECKPOINT_METADATA")
    )


def _is_npz(path: Path) -> bool:
    if not path.is_file() or head(path, 4) not in (b"PK\x03\x04", b"PK\x05\x06"):
        return False
    from zipfile import BadZipFile, ZipFile

    try:
        with ZipFile(path) as archive:
            names = archive.namelist()
    except (BadZipFile, OSError, ValueError, NotImplementedError):
        return path.suffix == ".npz"
    return path.suffix == ".npz" if not names else all(name.endswith(".npy") for name in names)


def _is_torch_file(path: Path) -> bool:
    """Whether the first member of a zip archive is called `<anything>/data.pkl`, or it is what torch wrote before."""
    if not path.is_file():
        return False
    start = head(path, 30 + 256)
    name = start[30 : 30 + int.from_bytes(start[26:28], "little")]
    return (start[:4] == b"PK\x03\x04" and name.endswith(b"/data.pkl")) or start.startswith(b"\x80\x02\x8a\nl\xfc\x9cF")


def _is_keras(path: Path) -> bool:
    if not path.is_file():
        return False
    start = head(path, 8)
    if not start.startswith(b"PK\x03\x04"):
        return start == b"\x89HDF\r\n\x1a\n"
    from zipfile import BadZipFile, ZipFile

    try:
        with ZipFile(path) as archive:
            return "model.weights.h5" in archive.namelist()
    except (BadZipFile, OSError, ValueError, NotImplementedError):
        return path.suffix == ".keras"


def _is_tensorflow(path: Path) -> bool:
    """An index, or a directory of them."""
    if path.is_dir():
        return any(_is_tensorflow(one) for one in path.glob("*.index"))
    if not path.name.endswith(".index"):
        return False
    try:
        with open(path, "rb", opener=opener) as file:
            file.seek(-8, 2)
            return file.read() == bytes.fromhex("57fb808b247547db")
    except OSError:
        return False


def _is_deepspeed(path: Path) -> bool:
    """A directory of ZeRO's partitions, or one that ds_to_universal has made of it."""
    return path.is_dir() and (
        next(path.glob("*zero_pp_rank_*_optim_states.pt"), None) is not None
        or (path / "zero" / "optimizer_state.pt").is_file()
    )


_WEIGHTS_AND_TEXTS: Final = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")

BUILT_IN: Final = (
    Format(
        "hf",
        "a directory of Hugging Face's tools",
        "tenuto.formats.hugging_face",
        _is_hugging_face,
        directory=True,
        names=_WEIGHTS_AND_TEXTS,
        writes=True,
    ),
    Format(
        "safetensors",
        "safetensors",
        "tenuto.formats.safetensors",
        _is_safetensors,
        (".safetensors",),
        names=_WEIGHTS_AND_TEXTS,  # a model's directory without a configuration
        writes=True,
    ),
    Format("gguf", "GGUF", "tenuto.formats.gguf", begins_with(b"GGUF"), (".gguf",), reads=False, writes=True),
    Format(
        "orbax",
        "a checkpoint of Orbax",
        "tenuto.formats.orbax",
        _is_orbax,
        directory=True,
        names=("_*", "*.ocdbt", "d", "ocdbt.process_*", "array_metadatas", "commit_success.txt"),
        nested=True,
        extra="orbax",
        writes=True,
    ),
    Format(
        "keras",
        "a file of Keras",
        "tenuto.formats.keras_h5",
        _is_keras,
        (".weights.h5", ".keras", ".h5"),
        extra="keras",
        writes=True,
    ),
    Format(
        "tf",
        "a checkpoint of TensorFlow",
        "tenuto.formats.tf_bundle",
        _is_tensorflow,
        directory=True,
        names=("checkpoint", "*.index", "*.data-*"),
        extra="tensorflow",
        writes=True,
    ),
    Format("npz", "a numpy archive", "tenuto.formats.npz", _is_npz, (".npz",), writes=True),
    Format("deepspeed", "a checkpoint of DeepSpeed", "tenuto.formats.deepspeed", _is_deepspeed, directory=True),
    Format("torch", "a file of torch.save", "tenuto.formats.torch_file", _is_torch_file, (".pt", ".pth", ".ckpt")),
    Format("dcp", "a torch.distributed.checkpoint", "tenuto.formats.dcp", holds(".metadata"), directory=True),
)
"""In the order in which they are tried: those with a stricter `detects` first."""


def check_present(path: Path) -> None:
    """Raises StoreError unless there is a file or a directory at `path`."""
    if not path.exists():
        raise StoreError(f"{path} is not there", subject=str(path), hint=typed("ls", "-d", path.parent))
    if (kind := strange(path.stat().st_mode)) is not None:
        raise StoreError(
            f"{path} cannot be read: it is {kind}, not a regular file", subject=str(path), hint=typed("ls", "-l", path)
        )


@cache
def formats() -> tuple[Format, ...]:
    """Returns every format: the built-in ones, and those of installed packages."""
    from importlib.metadata import entry_points  # slow to import

    return (*BUILT_IN, *(cast(Format, point.load()) for point in entry_points(group=GROUP)))


def named(name: str) -> Format:
    """Returns a format by its name. UsageError names those that there are."""
    for one in formats():
        if one.name == name:
            return one
    near = nearest(name, [one.name for one in formats()])
    raise UsageError(
        f"there is no format {name!r}; there are: {', '.join(one.name for one in formats())}",
        subject=name,
        hint=f"did you mean {near[0]}?" if near else None,
    )


def detect(path: Path) -> Format | None:
    """Returns the format of what lies at `path`; None where it is none that is known."""
    return next((one for one in formats() if one.detects(path)), None)


def read(path: str | Path, *, format: str | None = None) -> Reader:
    """Opens a checkpoint of another tool: `with tenuto.formats.read("model.safetensors") as reader: …`.

    Reads no tensor yet, and runs nothing that the file names. `format`: its name, where the content alone does not
    tell. Raises UsageError naming the known formats where it is none of them, MissingExtra naming the extra that it
    needs, CorruptionError where it is damaged.
    """
    path = Path(path)
    check_present(path)
    found = named(format) if format is not None else detect(path)
    if found is None:
        raise UsageError(
            f"{path} is not a checkpoint of a known format: {', '.join(one.name for one in formats())}",
            subject=str(path),
            hint="give the format's name, if it is one of them: --from NAME",
        )
    return found.read(path)
