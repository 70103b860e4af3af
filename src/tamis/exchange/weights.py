"""The weights of a folder of someone else, from safetensors alone, each taken once."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from tamis.files import read_table

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")


class Weights:
    """Tensors by name; what nobody takes is an error at the end, so that no part of a model is left out in silence."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left: dict[str, Tensor] = {}
        for file in _files(folder):
            self.left.update(_load(file))

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape, in fp32."""
        if name not in self.left:
            raise ValueError(
                f"{self.folder} has no weight {name}: its files are torn, or its config is another model's"
            )
        tensor = self.left.pop(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be of shape {shape}, as the config says, got {tuple(tensor.shape)}")
        return tensor.float().contiguous()

    def take_or(self, default: Tensor, name: str) -> Tensor:
        """The tensor of that name, if there is one, else the default of the same shape."""
        return self.take(name, *default.shape) if name in self.left else default

    def drop(self, pattern: str) -> None:
        """Let go of tensors that hold nothing learned, such as masks and tables."""
        self.left = {name: tensor for name, tensor in self.left.items() if not re.fullmatch(pattern, name)}

    def rename(self, prefix: str) -> None:
        """Take a prefix away where names have it."""
        self.left = {name.removeprefix(prefix): tensor for name, tensor in self.left.items()}

    def finish(self) -> None:
        """Raise if something is left."""
        if self.left:
            shown = ", ".join(sorted(self.left)[:5])
            raise ValueError(f"{self.folder} has weights that our model has no place for: {shown}")


def _files(folder: Path) -> list[Path]:
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        shards = read_table(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{folder / INDEX} does not say where weights are")
        names = sorted(set(shards.values()))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{folder / INDEX} names {name!r}, which is no file of safetensors beside it")
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} lacks {name}")
        return [folder / name for name in names]
    if any((folder / name).exists() for name in PICKLED):
        raise ValueError(
            f"{folder} has its weights as pickle, which is not loaded because it can run code: where you trust it, "
            "load it with transformers and save it again with save_pretrained"
        )
    raise FileNotFoundError(f"{folder} holds no {WHOLE} or {INDEX}")


def _load(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(str(file))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
