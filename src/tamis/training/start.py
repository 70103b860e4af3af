"""The weights of another run to start from, whatever mechanism it had."""

from __future__ import annotations

from pathlib import Path

from tamis.mechanisms import Mechanism
from tamis.models.loading import model_folder
from tamis.models.pretrained import PretrainedModel


def start_from(model: PretrainedModel, folder: Path) -> list[str]:
    """Take over the weights of a run, a checkpoint or a saved model; returns the names of those that start anew.

    What mechanisms learn is taken over where both have it.  Everything else must be the same in both.
    """
    source = type(model).from_pretrained(model_folder(folder))
    theirs, ours = source.state_dict(), model.state_dict()
    shared = {name: theirs[name] for name in ours.keys() & theirs.keys() if ours[name].shape == theirs[name].shape}
    different = (ours.keys() | theirs.keys()) - shared.keys() - _learned(model) - _learned(source)
    if different:
        first = min(different)
        found, wanted = (tuple(state[first].shape) if first in state else "no such weight" for state in (theirs, ours))
        raise ValueError(
            f"training.start: {folder} holds another kind of model, {len(different)} of its weights differ; "
            f"expected {first} to be {wanted}, got {found}"
        )
    model.load_state_dict(shared, strict=False)
    return sorted(ours.keys() - shared.keys())


def _learned(model: PretrainedModel) -> set[str]:
    """Names of what mechanisms learn."""
    return {
        f"{place}.{name}"
        for place, module in model.named_modules()
        if isinstance(module, Mechanism)
        for name in module.state_dict()
    }
