"""What a command prints as JSON, which has no NaN and no infinity."""

from __future__ import annotations

import json
import math


def dumps(value: object) -> str:
    """One line of JSON; a number that is not finite becomes ``"nan"``, ``"inf"`` or ``"-inf"``."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(held) for held in value]
    return value
