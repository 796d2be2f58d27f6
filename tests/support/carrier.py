"""Carries a flattened state through bytes and JSON and back, as a store would."""

from __future__ import annotations

from typing import Any

import numpy as np

from tenuto.model import canonical_json
from tenuto.state.encode.flattener import flatten
from tenuto.state.restore.match import match_state


class Carrier:
    """Saves into plain memory and restores from it."""

    def save(self, state: Any, private: Any = None) -> dict[str, Any]:
        return self.capture(flatten(state, private=private))

    def capture(self, flattened: Any) -> dict[str, Any]:
        images: dict[int, Any] = {}
        for number, device in enumerate(flattened.devices):
            leaves = [leaf for leaf, owner in enumerate(flattened.device) if owner == number]
            views = [np.full(flattened.specs[leaf].nbytes, 0xA5, np.uint8) for leaf in leaves]
            bound = device.bind([flattened.specs[leaf] for leaf in leaves], views)
            bound.copy([flattened.sources[leaf] for leaf in leaves], 0, len(leaves))
            bound.wait()
            images.update(zip(leaves, views, strict=True))
        tree = canonical_json.loads(canonical_json.dumps(flattened.tree))
        private = canonical_json.loads(canonical_json.dumps(flattened.private))
        return {"tree": tree, "private": private, "specs": flattened.specs, "images": images}

    def load(self, saved: dict[str, Any], into: Any = None, **how: Any) -> Any:
        prepared = match_state(saved["tree"], saved["private"], saved["specs"], into, **how)
        for number, sink in prepared.wants:
            data = saved["images"][number].copy()
            data.flags.writeable = False
            if sink.buffer is None:
                sink.fill(data)
            else:
                sink.buffer[:] = data
        self.report = prepared.report
        state = prepared.apply()
        self.report = prepared.report
        return state

    def round_trip(self, state: Any, into: Any = None, **how: Any) -> Any:
        return self.load(self.save(state), into, **how)
