"""The model card: a README.md beside every exported model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tamis import plugins
from tamis.experiments.base import Experiment
from tamis.experiments.folder import RunFolder
from tamis.files import replacing
from tamis.version import __version__

CARD = "README.md"


def write_card(run: RunFolder, experiment: Experiment, evaluation: dict[str, Any] | None) -> None:
    """Say what the model of a run is; `evaluation` is of this very model."""
    with replacing(run.model / CARD) as file:
        file.write(card(run, experiment, evaluation).encode())


def card(run: RunFolder, experiment: Experiment, evaluation: dict[str, Any] | None = None) -> str:
    """Recipe, data, scores, and how to load it."""
    try:
        validations = [record for record in run.records() if "valid_loss" in record]
    except ValueError:  # changed since: what they say is not worth telling, and no reason to stop
        validations = []
    rows = [(name.replace("valid_", "validation "), f"{value:.4g}") for name, value in _best(validations)]
    if evaluation is not None:
        rows += experiment.scores(evaluation)
    # A card is sent with its model: where plugins lie on this machine is not to be in it.
    experiment = replace(experiment, plugins=tuple(map(plugins.called, experiment.plugins)))
    needed = "".join(f"\nIt needs the plugin `{name}`: run its code first.\n" for name in experiment.plugins)
    # Signatures of scores have bars within, which would begin another column.
    escaped = ((name, value.replace("|", "\\|")) for name, value in rows)
    table = "\n".join(f"| {name} | {value} |" for name, value in escaped)
    return f"""---
library_name: tamis
tags: [{experiment.section}, sparse-attention]
---
# {experiment.name}

{experiment.description or experiment.what.capitalize()}

- What: {experiment.what}, attention: {experiment.mechanism()}
- Trained on: {experiment.told()}
- Steps: {validations[-1]["step"] if validations else 0}
- Written by: tamis {__version__}, torch {torch.__version__}
{needed}
## Scores

| | |
|---|---|
{table}

## How to load it

```python
{experiment.usage(run.model.name)}
```

## Recipe

```toml
{experiment.to_toml()}```
"""


def _best(validations: list[dict[str, float]]) -> list[tuple[str, float]]:
    """The numbers of the last validation that was the best so far."""
    best = next((record for record in reversed(validations) if record.get("best")), {})
    return [(name, value) for name, value in best.items() if name.startswith("valid_") and value is not None]
