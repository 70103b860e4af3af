import subprocess
import sys


def test_importing_tamis_imports_no_compiler_and_nothing_optional():
    """torch alone: not torch._dynamo, which takes as long again, and none of the packages of the extras."""
    names = ["torch._dynamo", "triton", "sentencepiece", "sacrebleu", "safetensors", "rich", "typer", "transformers"]
    code = f"import sys, tamis; print([name for name in {names} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
