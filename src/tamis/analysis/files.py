"""Arrays on disk: an .npz, without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tamis.files import check_file, replacing


def write_arrays(path: str | Path, arrays: Mapping[str, Tensor]) -> None:
    """Write arrays under their names, compressed; `path` holds them whole or is left as it was."""
    import numpy as np

    tables = {name: array.detach().cpu().numpy() for name, array in arrays.items()}
    with replacing(path) as file:
        np.savez_compressed(file, allow_pickle=False, **tables)


def read_arrays(path: str | Path) -> dict[str, Tensor]:
    """What `write_arrays` wrote."""
    import numpy as np

    path = check_file(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except Exception as error:  # there is nothing that zipfile, zlib and numpy do not raise on damaged bytes
        raise ValueError(f"{path} is damaged, or no .npz: {error!r}") from error
