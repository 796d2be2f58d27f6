"""What `tenuto import --in-place` prints."""

from __future__ import annotations

from pathlib import Path

from tenuto.cli.console import output


def carry_out(source: Path, where: str | None, *, run: str, step: int | None, format: str | None, json: bool) -> None:
    """Adopts the checkpoints at `source`, and reports them."""
    from tenuto.api.adopt import adopt
    from tenuto.errors import typed
    from tenuto.units import count, size

    adopted = adopt(source, where, run=run, step=step, format=format)
    place = adopted[0].where if adopted else str(source if where is None else where)
    if json:
        checkpoints = [
            {"checkpoint": one.id, "bytes": one.bytes, "leaves": one.leaves, "content": one.content} for one in adopted
        ]
        output.document("import", {"where": place, "source": str(source), "in_place": True, "checkpoints": checkpoints})
        return
    if not adopted:
        output.line(f"{place}: nothing new: all that lies in {source} was adopted before")
        return
    for one in adopted:
        output.line(f"{one.id}  {count(one.leaves, 'tensor')}, {size(one.bytes)}, where they lie")
    output.story("the files have a second name now: write new ones instead of writing over them")
    output.story(f"hint: {typed('tenuto', 'verify', place)} reads every byte of them again")
