import os

import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter.  It has to know before triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Nothing is looked for in a network: transformers asks for more of a model than its folder holds, and waits.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def registries():
    """What a test registers does not stay for others."""
    from tamis import plugins
    from tamis.data.tasks import TASKS
    from tamis.experiments import KINDS
    from tamis.mechanisms.registry import MECHANISMS
    from tamis.positions import POSITIONS
    from tamis.training.loggers import LOGGERS

    every = (MECHANISMS, POSITIONS, TASKS, LOGGERS, KINDS)
    before = [dict(registry) for registry in every]
    yield
    plugins._loaded.clear()
    for registry, kept in zip(every, before, strict=True):
        for name in set(registry) - set(kept):
            del registry[name]


@pytest.fixture(autouse=True)
def seeded():
    """A test draws the same numbers whatever ran before it in its worker."""
    torch.manual_seed(0)
