from pathlib import Path

import pytest

from tamis.config import arms_of, read_recipe, read_settings

RECIPES = Path(__file__).parent.parent / "recipes"
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


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_read_with_each_of_their_arms(path):
    assert read_recipe(path).name == path.stem
    arms = arms_of(path)
    assert {"softmax", "entmax"} <= set(arms)
    for arm in arms:
        read_recipe(path, arm=arm)
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
        ("name='x'", "needs 'data'"),
        ("name='x'\n[data]\ntrain='a'", r"\[data\].*valid"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\ntets='c'", "did you mean 'test'"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\n[trainig]\nlr=1", "did you mean 'training'"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\n[model]\nvocab_size=3", "follows from the vocabulary"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\n[model]\nmechanism='entmux'", "did you mean 'entmax'"),
        ("name='x'\nmodel=3\n[data]\ntrain='a'\nvalid='b'", "model must be a section"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\n[training]\nsteps='many'", "steps must be an int"),
        ("name='x'\n[data]\ntrain='a'\nvalid='b'\n[vocabulary]\nkind='word'", "kind must be one of"),
    ],
)
def test_bad_recipes(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recipe(path)


def test_other_ways_to_be_wrong(small, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no recipe"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="did you mean 'dense'"):
        read_recipe(small, arm="dens")
    with pytest.raises(ValueError, match=r"looks like training\.lr=3e-4"):
        read_recipe(small, ["training.lr"])
    with pytest.raises(ValueError, match="name is not a section"):
        read_recipe(small, ["name.x=3"])
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not TOML"):
        read_recipe(tmp_path / "bytes.toml")


def test_settings_of_one_section():
    assert read_settings(["beam=3", "method=sample", "top_p=0.9"]) == {"beam": 3, "method": "sample", "top_p": 0.9}
