import os

import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter.  It has to know before triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Nothing is looked for in a network: transformers asks for more of a model than its folder holds, and waits.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def seeded():
    """A test draws the same numbers whatever ran before it in its worker."""
    torch.manual_seed(0)
