"""What processes that share the weights of a model compute, against one: `tensor_crew.py` does the work."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from parallel import tensor_crew
from parallel.test_context import run
from tamis.models import CausalLM, CausalLMConfig


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run([tensor_crew.__file__, str(folder)], 2, 300)
    return folder


def check(folder, *prefixes):
    found = json.loads((folder / "found.json").read_text())
    chosen = {name: errors for name, errors in found.items() if name.startswith(prefixes)}
    assert chosen
    bounds = {name: 1e-6 if "float32" in name else 1e-12 for name in chosen}
    wrong = {name: errors for name, errors in chosen.items() if not max(errors.values()) <= bounds[name]}
    assert not wrong


def test_models_are_those_of_one_process(two):
    """Logits, gradients, and weights after a clipped step."""
    check(two, "model")


def test_layers_of_any_mechanism(two):
    check(two, "layer")


def test_weights_that_modules_share(two):
    check(two, "tied")


def test_a_cache_holds_the_heads_of_its_process(two):
    check(two, "decoded")


def test_dropout_is_alike_where_activations_are_and_different_where_they_are_not(two):
    check(two, "dropped")


def test_saved_as_one(two):
    check(two, "saved")
    torch.manual_seed(0)
    expected = CausalLM(CausalLMConfig(**tensor_crew.SIZES)).double().state_dict()
    again = CausalLM.from_pretrained(two / "model").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


def test_shards_are_read_by_one_process(two):
    model = CausalLM(CausalLMConfig(**tensor_crew.SIZES)).double()
    expected = CausalLM.from_pretrained(two / "model").state_dict()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=two / "shards")
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("heads", "the model: num_heads = 3 must be a multiple of the 2 processes"),
        ("key heads", "layers.0.self_attention: num_kv_heads = 1 must be a multiple of the 2 processes"),
        ("channels", "the model: ffn_dim = 9 must be a multiple of the 2 processes"),
        ("multihead", "0 is a MultiheadAttention, whose projections are one matrix"),
        ("mechanism", "Silent must define split_heads() to be divided by heads"),
        ("tied", "1 and 0.up share a weight, and what is divided can be nobody else's"),
        ("twice", "the model's weights are divided already"),
        ("dimension", "the mesh has no dimension 'rows': it has the dimensions data, tensor"),
        ("mesh", "mesh must be a DeviceMesh, as init_device_mesh makes it, got None"),
    ],
)
def test_bad_input(two, case, message):
    assert message in json.loads((two / "said.json").read_text())[case]


@pytest.mark.slow
def test_beside_sharded_data_and_sequences(tmp_path):
    """Four processes: FSDP2, or context parallelism, over the other dimension of the mesh."""
    run([tensor_crew.__file__, str(tmp_path)], 4, 300)
    check(tmp_path, "fsdp", "context")
