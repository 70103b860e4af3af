import os

import torch

# Without a GPU the kernels run in Triton's interpreter.  It has to know before triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
