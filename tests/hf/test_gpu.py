"""Sparsified models on a CUDA device: what they compute on the CPU, through the fused kernels."""

import logging

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import tamis.hf
from hf import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on(device, fed):
    return {key: value.to(device) for key, value in fed.items()}


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@pytest.mark.parametrize("mechanism", tiny.MECHANISMS)
def test_a_gpu_computes_what_the_cpu_does(name, mechanism):
    torch.backends.cuda.matmul.allow_tf32 = False
    model, fed = tamis.hf.sparsify(tiny.build(name), mechanism), tiny.inputs(name)
    fed["attention_mask"][0, -2:] = 0
    expected, gradients = model(**fed).logits, tiny.gradients(model, fed)
    model, fed = model.cuda(), on("cuda", fed)
    torch.testing.assert_close(model(**fed).logits.cpu(), expected, rtol=1e-3, atol=1e-3)
    model.zero_grad()
    logits = model(**fed).logits
    directions = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7))
    (logits * directions.cuda()).mean().backward()
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad.cpu(), gradients[key], rtol=2e-2, atol=1e-4, msg=key)


@pytest.mark.parametrize("mechanism", tiny.MECHANISMS)
def test_generation_in_bfloat16_takes_the_kernels(mechanism, caplog):
    model = tamis.hf.sparsify(tiny.build("llama"), mechanism).to("cuda", torch.bfloat16)
    with caplog.at_level(logging.WARNING, "tamis"):
        out = model.generate(**on("cuda", tiny.inputs("llama")), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert out.shape == (2, 15)
    assert "attention takes the backend" not in caplog.text
