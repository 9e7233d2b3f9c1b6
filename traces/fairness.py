"""A measure of how evenly tenants were served."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from traces.numeric_columns import Floats, over


def jain_index(tenants: pa.ChunkedArray, tokens: Floats) -> float | None:
    """Return Jain's index (Jain, Chiu and Hawe 1984) of the `tokens` that each tenant's requests got.

    None if there are fewer than two tenants.
    """
    names = pc.dictionary_encode(tenants.combine_chunks())
    if len(names.dictionary) < 2:
        return None
    service = np.bincount(names.indices.to_numpy(), weights=tokens, minlength=len(names.dictionary))
    return over(float(service.sum()) ** 2, len(service) * float((service**2).sum()))
