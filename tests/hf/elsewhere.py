"""Run by test_travel.py in a process of its own: loads folders that another process wrote.

elsewhere.py FOLDER imported     with tamis.hf imported, every model and tokenizer
elsewhere.py FOLDER foreign      without: errors that say what to do, then trust_remote_code
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file


def check(folder, **options):
    """What is loaded computes what was written down, to the bit."""
    auto, name = (folder / "auto.txt").read_text().split()
    fed = load_file(folder / "inputs.safetensors")
    expected = fed.pop("logits")
    model = getattr(transformers, auto).from_pretrained(folder, **options)
    assert type(model).__name__ == name
    with torch.no_grad():
        assert torch.equal(model(**fed).logits, expected), folder.name
    assert type(model).__module__.startswith("tamis.hf")


def check_tokens(folder, **options):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    ids = (folder / "tokens.txt").read_text()
    assert str(tokenizer("The boy has said ü.").input_ids) == ids, folder.name


def error_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("a model was loaded")


root, how = Path(sys.argv[1]), sys.argv[2]
folders = sorted(path for path in root.iterdir() if path.is_dir())
if how == "imported":
    import tamis.hf  # noqa: F401

    assert "tamis.hf.models" not in sys.modules
    for folder in folders:
        check(folder)
        if (folder / "tokens.txt").exists():
            check_tokens(folder)
else:
    auto = transformers.AutoModelForCausalLM
    said = error_of(auto.from_pretrained, root / "llama", trust_remote_code=False)
    assert "trust_remote_code=True" in said, said
    sys.modules["tamis"] = None  # as if it were not installed
    for name in ("llama", "own_causal_lm"):
        said = error_of(auto.from_pretrained, root / name, trust_remote_code=True)
        assert said.startswith("ImportError"), said
        assert "pip install 'tamis[hf" in said, said
    del sys.modules["tamis"]
    for name in list(sys.modules):
        if "tamis_model" in name:
            del sys.modules[name]
    for folder in (root / "llama", root / "t5", root / "own_seq2seq"):
        check(folder, trust_remote_code=True)
    check_tokens(root / "own_seq2seq", trust_remote_code=True)
print("all is well")
