import subprocess
import sys

import torch

import tamis
from tamis.attention.call import check_call
from tamis.functional.attention import attention


def test_importing_tamis_imports_no_compiler_and_nothing_optional():
    """torch alone: not torch._dynamo, which takes as long again, and none of the packages of the extras."""
    names = ["torch._dynamo", "triton", "sentencepiece", "sacrebleu", "safetensors", "rich", "typer", "transformers"]
    code = f"import sys, tamis; print([name for name in {names} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_attention_is_a_function_beside_the_package_of_that_name():
    query = torch.randn(1, 1, 3, 4)
    assert tamis.attention is tamis.functional.attention is attention
    assert tamis.attention(query, query, query).shape == check_call(query, query, query).query.shape
