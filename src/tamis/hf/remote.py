"""What a folder has beside its weights for those who have not imported tamis.

`trust_remote_code=True` runs MODULE, a few lines that import tamis or say how to get it; without it transformers says
that it is needed.  Nothing else of our code is copied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tamis.files import replacing

MODULE = "tamis_model"
_SOURCE = '''"""The package tamis has the code of this model: this file only asks for it."""

try:
    import tamis.hf
except ImportError as error:
    raise ImportError("this model needs the package tamis: pip install 'tamis[hf,train]'") from error


def __getattr__(name):
    return tamis.hf.class_named(name)
'''


def write_module(folder: str | Path) -> None:
    """Write the module that `auto_map` names."""
    with replacing(Path(folder) / f"{MODULE}.py") as file:
        file.write(_SOURCE.encode())


class OurCode:
    """A class whose code is in tamis, and is not copied beside the weights."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: transformers would mark the class as one whose file is to be copied."""


class SavesModule(OurCode):
    """A config that is saved with the module, and says which class of it each Auto class loads."""

    def auto_classes(self) -> dict[str, str]:
        """Names of classes of ours, by those of the Auto classes; none if nobody could load them so."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """As in transformers, and the module."""
        if classes := self.auto_classes():
            self.auto_map = {auto: f"{MODULE}.{name}" for auto, name in classes.items()}
            write_module(save_directory)
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]
