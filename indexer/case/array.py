"""The check of one array of a case: its dtype and its shape."""

from __future__ import annotations

import numpy as np

from indexer.case.container import DTYPES, refuse
from kernel.shape import has_shape, shape_remedy


def check_array(name: str, array: object, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> None:
    """Refuse an array of another dtype or shape; None in a shape is any size.

    Raises:
        CaseFileError: naming the tensor, its value, the limit and the remedy.
    """
    if not isinstance(array, np.ndarray):
        refuse(name, type(array).__name__, "must be a numpy array", "call numpy.asarray() on it")
    if not any(array.dtype == DTYPES[dtype] for dtype in dtypes):
        refuse(
            f"{name}.dtype",
            array.dtype,
            f"must be one of {', '.join(dtypes)}",
            f"call .astype({DTYPES[dtypes[0]].name})",
        )
    if not has_shape(array.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        refuse(f"{name}.shape", list(array.shape), f"must be [{wanted}]", shape_remedy(array.shape, shape))
