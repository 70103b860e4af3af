import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import tamis
import tamis.hf
from hf import tiny

IDS = torch.zeros(3, 1, dtype=torch.long)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_softmax_of_the_scores_is_entmax_of_the_logits(alpha):
    logits = torch.randn(3, 50) * 3
    scores = tamis.hf.EntmaxLogitsProcessor(alpha)(IDS, logits)
    torch.testing.assert_close(scores.softmax(-1), tamis.entmax(logits, alpha), rtol=1e-4, atol=1e-6)
    assert torch.equal(scores == -torch.inf, tamis.entmax(logits, alpha) == 0)


def test_temperature_divides_the_logits():
    logits = torch.randn(3, 50) * 3
    scores = tamis.hf.EntmaxLogitsProcessor(1.5, temperature=0.5)(IDS, logits)
    torch.testing.assert_close(scores.softmax(-1), tamis.entmax(logits * 2, 1.5), rtol=1e-4, atol=1e-6)


def test_forbidden_tokens_stay_forbidden():
    logits = torch.randn(3, 50)
    logits[:, 7] = -torch.inf
    assert (tamis.hf.EntmaxLogitsProcessor()(IDS, logits)[:, 7] == -torch.inf).all()


def test_generate_draws_from_the_support_alone():
    model, fed = tiny.build("llama"), tiny.inputs("llama", batch=8)
    processor = tamis.hf.EntmaxLogitsProcessor(1.5)
    out = model.generate(
        **fed,
        do_sample=True,
        top_k=0,
        max_new_tokens=8,
        min_new_tokens=8,
        logits_processor=[processor],
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[:, fed["input_ids"].shape[1] :]
    for step, logits in enumerate(out.logits):
        logits[:, 2] = -torch.inf  # the end is not yet allowed
        probabilities = tamis.entmax(logits, 1.5)
        assert (probabilities.gather(1, new[:, step, None]) > 0).all()
        assert (probabilities == 0).any()


@pytest.mark.parametrize(("arguments", "message"), [({"alpha": 0.5}, "alpha"), ({"temperature": 0.0}, "temperature")])
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        tamis.hf.EntmaxLogitsProcessor(**arguments)
