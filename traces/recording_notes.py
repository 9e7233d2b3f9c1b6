"""The `notes` of a run: a JSON object with facts about a recording that have no column.

A run of the real engine has `attention`, `model` and `memory`. For an MoE model it also has `experts`, with the number
of experts in a layer (`experts`) and the number of experts per token (`topk`). A simulated run has these notes, as far
as they are known:

front_door  time that the API server in front of it took, as in `serving.front_door.FrontDoor`
gpu         the GPU whose kernel tables timed its steps
trust       `level` and `reason`, as in `calibration.trust`
bands       90 % bands by metric and statistic; the statistic of a single number is `value`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from serving.former_names import with_present_names


def notes_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes of a row of `runs`; empty if it has none or they are not a JSON object."""
    try:
        notes = json.loads(run.get("notes") or "{}")
    except ValueError:
        return {}
    return with_present_names(notes) if isinstance(notes, dict) else {}
