"""What lies beside a model's weights: its way of decoding."""

from __future__ import annotations

import json
from pathlib import Path

from tamis.decoding.settings import DecodingConfig
from tamis.files import check_sealed

DECODING = "decoding.json"


def save_decoding(folder: Path, decoding: DecodingConfig) -> None:
    (folder / DECODING).write_text(json.dumps(decoding.to_dict(), indent=2) + "\n", encoding="utf-8")


def load_decoding(folder: Path) -> DecodingConfig:
    """What `save_decoding` wrote, or the defaults."""
    path = folder / DECODING
    check_sealed(folder, DECODING)
    if not path.is_file():
        return DecodingConfig()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"expected a table of settings, got {type(values).__name__}")
        return DecodingConfig.from_dict(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
