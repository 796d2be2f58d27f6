"""Installs the browser of `make test-pages` below build/browsers: playwright's own, else Debian's, unpacked there.

Nothing of the machine changes and no root is needed. Where neither can be had, the reason is left in `missing`, and the
tests skip by it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from stores.install import Missing, debian_packages, run

BROWSERS = Path(__file__).resolve().parents[2] / "build" / "browsers"
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "headless_shell", "chrome")


def environment() -> dict[str, str]:
    """Returns the environment in which an unpacked browser finds its libraries and fonts."""
    root = BROWSERS / "debian/root"
    if not root.exists():
        return dict(os.environ)
    libraries = sorted({str(one.parent) for one in root.rglob("lib*.so*")} | {*_set("LD_LIBRARY_PATH")})
    fonts = {"FONTCONFIG_PATH": str(root / "etc/fonts")} if (root / "etc/fonts").exists() else {}
    return os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "XDG_DATA_HOME": str(root / "usr/share"),
        **fonts,
    }


def _set(variable: str) -> list[str]:
    return [one for one in os.environ.get(variable, "").split(os.pathsep) if one]


def browser() -> Path | None:
    """Returns a Chromium that starts: $TENUTO_BROWSER, one below build/browsers, else the machine's; None without."""
    return next((found for found in _candidates() if _starts(found)), None)


def _candidates() -> Iterator[Path]:
    if named := os.environ.get("TENUTO_BROWSER"):
        yield Path(named)
    if BROWSERS.exists():
        named_so = [one for one in sorted(BROWSERS.rglob("*")) if one.name in _NAMES]
        yield from (one for one in named_so if one.is_file() and os.access(one, os.X_OK))
    yield from (Path(found) for name in _NAMES if (found := shutil.which(name)))


def _starts(path: Path) -> bool:
    try:
        words = [path, "--headless", "--no-sandbox", "--dump-dom", "data:text/html,<p>it starts</p>"]
        done = subprocess.run(words, capture_output=True, check=False, timeout=60, env=environment())
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"it starts" in done.stdout


def main() -> None:
    if (found := browser()) is not None:
        print(f"the browser is {found}")
        return
    BROWSERS.mkdir(parents=True, exist_ok=True)
    reasons = []
    own = os.environ | {"PLAYWRIGHT_BROWSERS_PATH": str(BROWSERS)}
    for what, install in (
        (
            "playwright",
            lambda: run([sys.executable, "-m", "playwright", "install", "--only-shell", "chromium"], env=own),
        ),
        ("Debian", lambda: debian_packages(["chromium-headless-shell", "fonts-dejavu-core"], BROWSERS / "debian")),
    ):
        try:
            install()
        except Missing as error:
            reasons.append(f"{what}: {error}")
        if (found := browser()) is not None:
            print(f"the browser is {found}")
            return
    (BROWSERS / "missing").write_text("\n".join(reasons) or "what was installed does not start")
    print(f"no browser: {'; '.join(reasons)}")


if __name__ == "__main__":
    main()
