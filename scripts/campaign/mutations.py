"""What the campaigns `fuzz` and `security` both do to data."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any


def changed(draw: random.Random, tree: Any, odd: Sequence[Any]) -> Any:
    """A tree of JSON in which one to three places are deleted or hold something odd."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw.randrange(1, 4)):
        holder: Any = tree
        while isinstance(holder, dict | list) and holder:
            name = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
            if draw.random() < 0.3 or not isinstance(holder[name], dict | list) or not holder[name]:
                if draw.random() < 0.15:
                    del holder[name]
                else:
                    holder[name] = copy.deepcopy(draw.choice(odd))
                break
            holder = holder[name]
    return tree
