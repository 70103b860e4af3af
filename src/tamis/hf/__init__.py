"""Sparse attention in Hugging Face models.

    import tamis.hf
    model = AutoModelForCausalLM.from_pretrained(...)
    tamis.hf.sparsify(model)

See docs/huggingface.md.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError("tamis.hf needs transformers: pip install 'tamis[hf]'") from error
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
    raise ImportError(f"tamis.hf needs transformers 5.17 or newer, got {transformers.__version__}")

from tamis.hf.convert import densify, sparsify
from tamis.hf.interface import register
from tamis.hf.pretrained import from_pretrained
from tamis.hf.running import run_model
from tamis.hf.sampling import EntmaxLogitsProcessor
from tamis.hf.sites import AttentionSite
from tamis.hf.spread import measure_spread, set_spread
from tamis.hf.training import added_parameters, parameter_groups, sparsity_pressure

__all__ = [
    "AttentionSite",
    "EntmaxLogitsProcessor",
    "added_parameters",
    "densify",
    "from_pretrained",
    "measure_spread",
    "parameter_groups",
    "register",
    "run_model",
    "set_spread",
    "sparsify",
    "sparsity_pressure",
]

register()
