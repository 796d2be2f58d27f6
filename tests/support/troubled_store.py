"""A store that is full, or hangs, on command, in every process of a test: as a `sitecustomize` that they import."""

from __future__ import annotations

from pathlib import Path

SITE = """
import os, sys, time
TROUBLE = os.environ.get("TROUBLE")
if TROUBLE:
    from tenuto.errors import StoreFull
    from tenuto.store.local.store import LocalStore

    def troubled(method, puts):
        def call(store, *words, **more):
            while store.url.endswith("/ckpts") and os.path.exists(TROUBLE):
                with open(TROUBLE) as file:
                    kind = file.read()
                if kind == "full" and puts:
                    raise StoreFull("no space left", subject=store.url, hint="remove something")
                if kind != "hung":
                    break
                time.sleep(0.02)
            return method(store, *words, **more)
        return call

    for name in ("put_if_absent", "get", "children", "stat"):
        setattr(LocalStore, name, troubled(getattr(LocalStore, name), name == "put_if_absent"))
"""


def variables(directory: Path) -> dict[str, str]:
    """Returns the environment in which the store `ckpts` is in trouble while the file `trouble` says "full" or
    "hung"."""
    import tenuto

    (directory / "site").mkdir(exist_ok=True)
    (directory / "site" / "sitecustomize.py").write_text(SITE)
    src = Path(tenuto.__file__).parents[1]
    return {"PYTHONPATH": f"{directory / 'site'}:{src}", "TROUBLE": str(directory / "trouble")}
