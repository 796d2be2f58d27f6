"""Images that tests have left in this machine's memory, taken away again.

An image outlives its process on purpose, and names the directory of its repository. pytest gives the same ones to the
next run of the tests, which would find there what an earlier one left.
"""

from pathlib import Path

from tenuto.engine.memory_tier.listing import dead_images, remove_image


def remove_below(directory: Path) -> None:
    """Removes the sealed images of dead processes whose repository lies, or lay, below the directory."""
    for found in dead_images():
        if found.footer is not None and Path(found.footer.where).is_relative_to(directory):
            remove_image(found.slot)
