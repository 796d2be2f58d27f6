"""One save is traced by the operating system: no call that changes the repository bypasses the seam."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SAVE = """
import json, sys
import numpy as np
from tenuto.engine.save.job import ManifestDetails
from tenuto.engine.save.saver import Saver
from tenuto.repo.ownership.claim import claim
from tenuto.repo.repository import Repo
from tenuto.state.encode.flattener import flatten
from tenuto.store.local.store import LocalStore
from tenuto.store.local.syscalls import OperatingSystem
from tenuto.testing.recorder import Recorder

recorder = Recorder(OperatingSystem(), root=sys.argv[1])
repo = Repo.create_or_open(LocalStore(sys.argv[1] + "/team/checkpoints", filesystem=recorder))
saver = Saver(repo, "main")
saver.attempt = claim(repo, "main", None)
saver.save(flatten({"weights": np.arange(600_001, dtype=np.float32)}), 10, wait=True, about=ManifestDetails()).wait()
saver.close()
saver.attempt.release()
print(json.dumps([(call.kind, call.path) for call in recorder.log]))
"""

CALLS = {
    "pwrite": r"(?:pwrite64|pwritev2?|writev?)\(\d+<([^>]*)>",
    "truncate": r"ftruncate\(\d+<([^>]*)>",
    "reserve": r"fallocate\(\d+<([^>]*)>",
    "fsync": r"f(?:data)?sync\(\d+<([^>]*)>",
    "create": r'openat\([^"]*"([^"]*)", [^,)]*O_CREAT',
    "link": r'link(?:at)?\((?:[^",]*, )?"[^"]*", (?:[^",]*, )?"([^"]*)"',
    "rename": r'rename(?:at2?)?\((?:[^",]*, )?"[^"]*", (?:[^",]*, )?"([^"]*)"',
    "unlink": r'unlink\("([^"]*)"|unlinkat\([^"]*"([^"]*)", 0\)',
    "mkdir": r'mkdir(?:at)?\((?:[^",]*, )?"([^"]*)"',
    "rmdir": r'rmdir\("([^"]*)"|unlinkat\([^"]*"([^"]*)", AT_REMOVEDIR\)',
}
TRACED = "pwrite64,pwritev,pwritev2,write,writev,ftruncate,fallocate,fsync,fdatasync,openat,open,creat,link,linkat"
TRACED += (
    ",rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,truncate,symlink,symlinkat,copy_file_range,sendfile"
)


def traced(text: str, root: str) -> Counter[tuple[str, str]]:
    """Successful changing calls on paths below `root`, as the recorder names them."""
    found: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        if root not in line or re.search(r"= -1 E", line):
            continue
        kinds = [(kind, match) for kind, pattern in CALLS.items() if (match := re.search(rf"\b{pattern}", line))]
        if not kinds:
            assert not re.search(r"O_(WRONLY|RDWR|TRUNC)|symlink|copy_file|sendfile|\btruncate", line), line
            continue
        [(kind, match)] = kinds
        path = next(group for group in match.groups() if group)
        if kind == "fsync" and Path(path).is_dir():
            kind = "fsync_directory"
        if path == root or path.startswith(root + "/"):
            found[kind, path[len(root) :] or "/"] += 1
    return found


def test_r1_no_call_bypasses_the_seam(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    root, out = tmp_path / "disk", tmp_path / "trace"
    root.mkdir()
    command = [strace, "-f", "-y", "-s", "0", "-e", f"trace={TRACED}", "-e", "signal=none", "-o", str(out)]
    done = subprocess.run(
        [*command, sys.executable, "-c", SAVE, str(root)], capture_output=True, text=True, check=False
    )
    if "ptrace" in done.stderr:
        pytest.skip("this place allows no tracing")
    assert done.returncode == 0, done.stderr
    recorded = Counter((kind, path) for kind, path in json.loads(done.stdout))
    seen = traced(_joined(out.read_text()), str(root))
    assert seen == recorded, f"bypassed: {seen - recorded}; not seen: {recorded - seen}"
    assert sum(recorded.values()) > 60
    assert any(kind == "reserve" for kind, _ in recorded), "the pack is large enough for every kind of call"


def _joined(text: str) -> str:
    """Calls that another thread interrupted in the trace, put together again."""
    waiting: dict[str, str] = {}
    lines = []
    for line in text.splitlines():
        thread, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            waiting[thread] = call.removesuffix("<unfinished ...>")
        elif resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", call):
            lines.append(waiting.pop(thread) + resumed[1])
        else:
            lines.append(call)
    return "\n".join(lines)
