"""Loading that leaves nothing out in silence."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from tamis.hf.remote import OurCode


class LoadsWhole(OurCode):
    """Reads safetensors alone, and refuses files that lack weights."""

    may_not_miss: ClassVar[str] = ""
    """A pattern of the names of weights that files must have."""

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with an error for what is not in the files."""
        if not kwargs.setdefault("use_safetensors", True):
            raise ValueError("weights are read from safetensors alone: use_safetensors must not be False")
        asked = kwargs.pop("output_loading_info", False)
        found = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        missing = sorted(name for name in found[1]["missing_keys"] if re.search(cls.may_not_miss, name))
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ValueError(f"{path} has no {shown}")
        return found if asked else found[0]
