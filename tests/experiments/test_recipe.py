import dataclasses
import tomllib
from pathlib import Path

import pytest
import torch

from tamis.decoding import DecodingConfig
from tamis.experiments import Translation, arms_of, read_recipe, read_settings
from tamis.experiments.recipe import as_toml
from tamis.settings import choose_device
from tamis.training.settings import TrainingConfig

DATA = "[data]\ntrain='a.tsv'\nvalid='b.tsv'\n"
RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = """
name = "small"
[data]
train = ["a.en", "a.de"]
valid = "b.tsv"
[model]
embed_dim = 64
mechanism = { name = "entmax", alpha = 1.5 }
cross_mechanism = "rela"
[training]
lr = 1e-4
[arms.dense]
model.mechanism = "softmax"
training.lr = 2e-4
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


TRANSLATION = [path for path in sorted(RECIPES.glob("*.toml")) if isinstance(read_recipe(path), Translation)]


@pytest.mark.parametrize("path", TRANSLATION, ids=lambda path: path.stem)
def test_shipped_recipes_are_read_with_each_of_their_arms(path):
    assert read_recipe(path).name == path.stem
    arms = arms_of(path)
    assert {"softmax", "entmax"} <= set(arms)
    for arm in arms:
        read_recipe(path, arms=arm)
    head = path.read_text().splitlines()[:5]
    for word in ("Hardware", "Time", "Expect"):
        assert any(word in line for line in head), f"{path.name} does not say {word}"


def test_what_is_written_is_read_back(small, tmp_path):
    recipe = read_recipe(small, ['data.source_language=a "quoted" line'])
    (tmp_path / "again.toml").write_text(recipe.to_toml())
    assert read_recipe(tmp_path / "again.toml") == recipe


def test_arms_and_overrides(small):
    recipe = read_recipe(small, ["training.steps=7", "model.activation=gelu", "training.lr=0.5"], "dense")
    assert recipe.model["mechanism"] == "softmax"
    assert (recipe.training.steps, recipe.training.lr) == (7, 0.5)
    assert recipe.model["activation"] == "gelu"
    assert read_recipe(small).training.lr == 1e-4


def test_a_mechanism_for_all_sites_and_one_for_its_own(small):
    class Vocabulary:
        pad_id = 3

        def __len__(self):
            return 99

    class Prepared:
        source_vocabulary = target_vocabulary = Vocabulary()

    config = read_recipe(small).model_config(Prepared())
    assert config.encoder_mechanism == config.decoder_mechanism == {"name": "entmax", "alpha": 1.5}
    assert config.cross_mechanism == "rela"
    assert (config.vocab_size, config.source_vocab_size, config.pad_id) == (99, None, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not TOML"),
        ("[data]\ntrain='a'\nvalid='b'", "needs 'name'"),
        ("name='x'", r"one of the sections \[data\] \(translation\), \[text\].* this has none"),
        ("name='x'\n[data]\ntrain='a'", r"\[data\].*valid"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\ntets='c'", "did you mean 'test'"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\n[trainig]\nlr=1", "did you mean 'training'"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\n[model]\nvocab_size=3", "follows from the vocabulary"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\n[model]\nmechanism='entmux'", "did you mean 'entmax'"),
        (
            "name='x'\n[data]\ntrain='a'\nvalid='b'\n[model]\nposition='learned'\nmax_length=100",
            "are fewer than data.max_length = 256",
        ),
        ("name='x'\nmodel=3\n[data]\ntrain='a'\nvalid='b'", "model must be a section"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\n[training]\nsteps='many'", "steps must be an int"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\n[vocabulary]\nkind='word'", "kind must be one of"),
        ("name=3\n" + DATA, "name must be a string, got 3"),
        ("name=''\n" + DATA, "name must be one that a folder can have"),
        ("name='a/b'\n" + DATA, "without / or a leading dot, got 'a/b'"),
        ("name='..'\n" + DATA, "without / or a leading dot"),
        ("name='x'\ndescription=3\n" + DATA, "description must be a string"),
        ("name='x'\n[data]\ntrain=3\nvalid='b'", "train must be a string or a list of two, got 3"),
        ("name='x'\n[data]\ntrain=['a']\nvalid='b'", "train must be a string or a list of two"),
        ("name='x'\n[data]\ntrain='a'\nvalid=['a', 3]", "valid must be a string or a list of two"),
        ("name='x'\n" + DATA + "test=true", "test must be a string or a list of two, got True"),
        ("name='x'\n" + DATA + "gold=['a', 'b']", "gold must be a string"),
        ("name='x'\n" + DATA + "folder=1", "folder must be a string"),
        ("name='x'\n" + DATA + "source_language=1", "source_language must be a string"),
        ("name='x'\n" + DATA + "[vocabulary]\nmodel=1", "model must be a string"),
        ("name='x'\n" + DATA + "[vocabulary]\nshared='no'", "shared must be true or false, got 'no'"),
        ("name=1979-05-27\n" + DATA, "name is a date or a time, which no setting is, got 1979-05-27"),
        ("name='x'\n" + DATA + "[model]\nmechanism={name=[07:32:00]}", r"model\.mechanism\.name is a date or a time"),
        ("name='x'\narms=3\n" + DATA, "arms must be a section with a table for each arm, got 3"),
        ("name='x'\n" + DATA + "[arms]\na=3", r"arms\.a must be a table of what the arm has different, got 3"),
        ("x=" + "[" * 5000 + "]" * 5000, "is not TOML"),
        (".".join("a" * 5000) + "=1", "bad.toml"),
        ("name='x'\n" + DATA + "[training]\nsteps=" + "9" * 5000, "is not TOML"),
    ],
)
def test_bad_recipes(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recipe(path)


def test_an_arm_replaces_plain_values(small):
    small.write_text(SMALL + "[arms.other]\nname = 'other'\ndecoding.beam = 2\n")
    recipe = read_recipe(small, arms="other")
    assert (recipe.name, recipe.decoding.beam, recipe.training.lr) == ("other", 2, 1e-4)
    assert read_recipe(small).name == "small"


@pytest.mark.parametrize(
    ("arm", "message"),
    [("training = 3", r"arms\.wrong\.training must be a section, got the value 3"),
     ("name.x = 3", r"arms\.wrong\.name must be a value, got the section \{'x': 3\}"),
     ("beam = 3", "has no setting 'beam'; did you mean 'decoding.beam'")],
)  # fmt: skip
def test_arms_that_do_not_fit(small, arm, message):
    small.write_text(SMALL + f"[arms.wrong]\n{arm}\n")
    with pytest.raises(ValueError, match=message):
        read_recipe(small, arms="wrong")


def test_a_byte_order_mark_is_passed_over(small):
    expected = read_recipe(small)
    small.write_bytes(b"\xef\xbb\xbf" + small.read_bytes())
    assert read_recipe(small) == expected
    assert arms_of(small) == ["dense"]


@pytest.mark.parametrize("text", ["\x7f", "\x00\x1f\n\r\t", "\\ \" '", "ä ★ \u2028 \U0001f642"])
def test_any_character_is_written_and_read_back(small, tmp_path, text):
    recipe = dataclasses.replace(read_recipe(small), description=text)
    (tmp_path / "again.toml").write_bytes(recipe.to_toml().encode())
    assert read_recipe(tmp_path / "again.toml") == recipe


@pytest.mark.parametrize("key", ["", "a b", "ä", "a.b", '"', "\x7f", "plain-1_A"])
def test_any_key_is_written_and_read_back(key):
    values = {key: 1, "section": {key: {key: [1, 2]}}}
    assert tomllib.loads(as_toml(values)) == values


def test_booleans_are_spelled_as_in_toml(small):
    assert read_recipe(small, ["training.compile=true"]).training.compile is True
    for name in ("compile", "deterministic", "tensorboard"):
        for wrong in ("False", "1"):
            with pytest.raises(ValueError, match=f"{name} must be true or false, got"):
                read_recipe(small, [f"training.{name}={wrong}"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 2**31}, "steps must be an int of at most 2147483647, got 2147483648"),
        ({"device_tokens": 10**30}, "device_tokens must be an int of at most"),
        ({"seed": 2**63}, "seed must be an int of at most 9223372036854775807"),
        ({"lr": 10**400}, "lr must be a number above 0"),
        ({"lr": float("nan")}, "lr must be a number above 0"),
        ({"loss_alpha": 3.0}, r"loss_alpha must lie in \[1, 2\], got 3\.0"),
        ({"loss_alpha": "1.5"}, "loss_alpha must be a number"),
        ({"betas": 3}, r"betas must be two numbers in \[0, 1\), got 3"),
        ({"betas": ["a", "b"]}, "betas must be two numbers"),
        ({"betas": [0.9, True]}, "betas must be two numbers"),
        ({"betas": [0.9, 1.0]}, "betas must be two numbers"),
        ({"betas": [0.9]}, "betas must be two numbers"),
        ({"eps": 1e-46}, "eps must be at least 1e-30, got 1e-46"),
    ],
)
def test_training_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig.from_dict(settings)


def test_training_settings_at_their_limits():
    config = TrainingConfig(steps=2**31 - 1, seed=2**63 - 1, betas=[0, 0.0], eps=1e-30, loss_alpha=1)
    assert config.betas == (0, 0.0)


def test_decoding_settings_are_bounded():
    tokens = dict.fromkeys(("max_length", "max_extra", "max_source_length"), 1_000_000)
    for name, most in {"beam": 10_000, **tokens, "top_k": 2_147_483_647}.items():
        with pytest.raises(ValueError, match=f"{name} must be an int of at most {most}"):
            DecodingConfig.from_dict({name: 10**20})
    assert DecodingConfig(seed=2**63 - 1).seed == 2**63 - 1


def test_devices_that_are_not_here():
    assert choose_device("cpu").type == "cpu"
    assert choose_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("foo", "cuda:99", "meta", "", *(() if torch.cuda.is_available() else ("cuda",))):
        with pytest.raises(ValueError, match=f"device must be one that is here: cpu.*got '{name}'"):
            choose_device(name)


def test_overrides_that_cannot_be_read(small):
    for text in ("[" * 5000, "9" * 5000):
        with pytest.raises(ValueError, match="cannot be read"):
            read_recipe(small, [f"training.steps={text}"])


def test_other_ways_to_be_wrong(small, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no recipe"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="did you mean 'dense'"):
        read_recipe(small, arms="dens")
    with pytest.raises(ValueError, match=r"looks like training\.lr=3e-4"):
        read_recipe(small, ["training.lr"])
    with pytest.raises(ValueError, match="name is not a section"):
        read_recipe(small, ["name.x=3"])
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not TOML"):
        read_recipe(tmp_path / "bytes.toml")


def test_settings_of_one_section():
    assert read_settings(["beam=3", "method=sample", "top_p=0.9"]) == {"beam": 3, "method": "sample", "top_p": 0.9}
