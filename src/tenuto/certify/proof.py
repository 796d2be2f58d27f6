"""What `tenuto certify` has proven, recorded in the repository that it was given: a training of the same script, under
the same conditions, says so in its certificates.

`certified/<key>/<n>.json`, the highest number wins. The key stands for the conditions and the script's name; the object
lists every file of the user's that had been imported, with its digest. A file that has changed since proves nothing.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tenuto.codec.digest import digest
from tenuto.errors import CorruptionError, ObjectNotFound
from tenuto.model import canonical_json
from tenuto.model.records import Json
from tenuto.record import record
from tenuto.repo.format import object_names, objects
from tenuto.repo.refs import append, numbers
from tenuto.repo.repository import Repo, now_text

KIND: Final = "proof"
MOST_FILES: Final = 4096
"""A proof of a script with more files of its own is neither written nor believed."""


@record
class CertifiedScript:
    """A training script as it runs. conditions: its arguments, and what else decides the bits of a training; files:
    digests of its own files, by their path from the script's directory, its own first."""

    conditions: Mapping[str, Json]
    files: Mapping[str, str]

    @property
    def directory(self) -> str:
        """Returns the directory of its proofs."""
        return _directory(next(iter(self.files)), self.conditions)

    def record(self) -> dict[str, Any]:
        return {"conditions": dict(self.conditions), "files": dict(self.files)}


def _directory(main: str, conditions: Mapping[str, Json]) -> str:
    return object_names.proofs_directory(digest(canonical_json.dumps([main, dict(conditions)])).hex())


def running_script(conditions: Mapping[str, Json]) -> CertifiedScript | None:
    """Returns the script of this process, with the modules of the user's that are imported by now; None without a file,
    as in a notebook."""
    main = _main()
    if main is None:
        return None
    paths = list(dict.fromkeys([main, *sorted(_imported())]))
    if len(paths) > MOST_FILES:
        return None
    files = {os.path.relpath(path, main.parent): content for path in paths if (content := _content(path))}
    return CertifiedScript(_with_arguments(conditions), files)


def _with_arguments(conditions: Mapping[str, Json]) -> dict[str, Json]:
    arguments = [argument.encode("utf-8", "replace").decode("utf-8") for argument in sys.argv[1:]]
    return {**conditions, "arguments": list(arguments)}


def put_proof(repo: Repo, script: CertifiedScript, *, saved: int, last: int) -> None:
    """Records that `certify` found the script exact: killed after step `saved`, resumed, and compared up to `last`."""
    append(repo, script.directory, KIND, {**script.record(), "created": now_text(), "last": last, "saved": saved})


def proof_of_running(repo: Repo, conditions: Mapping[str, Json]) -> dict[str, Json] | None:
    """Returns what the newest proof of this process's script says; None without one, if one of its files has changed
    since, or if a file is imported that certify has not seen. A damaged proof proves nothing, and `tenuto verify` names
    it. Files are read only where this script was proven under these conditions."""
    main = _main()
    if main is None:
        return None
    directory = _directory(main.name, _with_arguments(conditions))
    found = numbers(repo, directory)
    script = running_script(conditions) if found else None
    for number in reversed(found):
        name = object_names.numbered(directory, number)
        try:
            record = repo.decode(KIND, name, repo.store.get(name, limit=objects.SMALL))
            files = record.mapping("files")
            proof: dict[str, Json] = {
                "created": record.text("created"),
                "last": record.whole("last"),
                "saved": record.whole("saved"),
            }
        except (ObjectNotFound, CorruptionError):
            continue
        same = script is not None and script.files.keys() <= files.keys() and len(files) <= MOST_FILES
        unchanged = same and all(content == _content(main.parent / path) for path, content in files.items())
        return proof if files and unchanged else None
    return None


def _main() -> Path | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file else None


def _imported() -> Iterator[Path]:
    """Yields the files of imported modules, but for Python's own, installed packages and Tenuto."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders.append(str(Path(__file__).parents[1]))
    installed = tuple(form + os.sep for folder in folders for form in (folder, os.path.realpath(folder)))
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")  # getattr alone would load what is loaded lazily
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(installed):
            continue
        path = Path(file).resolve()
        if not str(path).startswith(installed) and not {"site-packages", "dist-packages"} & set(path.parts):
            yield path


def _content(path: Path) -> str:
    """Returns the digest of a file; empty if it cannot be read."""
    try:
        return digest(path.read_bytes()).hex()
    except OSError:
        return ""
