"""What a checkpoint of several ranks says of where they all are: in the data that they share, and in their random
streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.engine.job import About
from holdfast.engine.joint.messages import Post
from holdfast.errors import RanksDisagree
from holdfast.model import canonical
from holdfast.model.checkpoint import Json
from holdfast.state.streams import alike

_WHAT: Final = "where they are in the data that they share"


def whereabouts(about: About) -> dict[str, Json]:
    """What one rank posts, before objects are put."""
    return {"data": about.progress.get("data"), "random": dict(about.marks)}


def shared_progress(posts: Sequence[Post]) -> dict[str, Json]:
    """What the manifest's progress says for all ranks. RanksDisagree where those that share an order of samples are not
    at the same place in it; a rank without data says nothing."""
    said = {rank: post.head["data"] for rank, post in enumerate(posts) if post.head["data"] is not None}
    spelled = {rank: canonical.dumps(one).decode() for rank, one in said.items()}
    if len(set(spelled.values())) > 1:
        differing = ", ".join(f"rank {rank}: {one}" for rank, one in list(spelled.items())[:8])
        raise RanksDisagree(
            f"the ranks do not agree about {_WHAT} ({differing})",
            subject=_WHAT,
            hint="the samplers of all ranks take one seed= and one dataset, and all ranks as many batches",
        )
    marks: list[Mapping[str, str]] = [post.head["random"] for post in posts]
    found: dict[str, Json] = {"data": next(iter(said.values()))} if said else {}
    return found | ({"alike": alike(marks)} if all(marks) else {})
