"""Our own models and vocabularies in transformers: generate, pipelines, the Trainer."""

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import transformers

import tamis.hf
from hf import own


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    own.translator().save(root / "translator")
    own.generator().save(root / "generator")
    for name in ("translator", "generator"):
        model, tokenizer = tamis.hf.to_transformers(root / name)
        model.save_pretrained(root / f"{name}-hf")
        tokenizer.save_pretrained(root / f"{name}-hf")
    return root


@pytest.fixture
def seq2seq(folders):
    path = folders / "translator-hf"
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)


@pytest.fixture
def causal(folders):
    path = folders / "generator-hf"
    return transformers.AutoModelForCausalLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize(("beams", "cache"), [(1, True), (4, True), (4, False)])
def test_generate_writes_what_our_translator_writes(beams, cache, seq2seq):
    model, tokenizer = seq2seq
    texts = own.lines("source")[:4]
    fed = tokenizer(texts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 14, "num_beams": beams, "length_penalty": 0.0, "use_cache": cache}
    written = tokenizer.batch_decode(model.generate(**fed, **options), skip_special_tokens=True)
    assert written == own.translator()(texts, beam=beams, max_length=14, length_penalty=0.0)


@pytest.mark.parametrize("cache", [True, False])
def test_generate_continues_what_our_generator_continues(cache, causal):
    model, tokenizer = causal
    texts = ["The boy", "A"]
    fed = tokenizer(texts, return_tensors="pt", padding=True)
    assert tokenizer.padding_side == "left"
    found = model.generate(**fed, max_new_tokens=9, min_new_tokens=9, do_sample=False, use_cache=cache)
    ours = own.generator().generate(texts, method="greedy", max_length=9, min_length=10)
    assert found[:, fed.input_ids.shape[1] :].tolist() == [one[0].tokens for one in ours]


def test_tokens_are_those_of_the_vocabularies(folders, seq2seq, causal):
    ours, (_, tokenizer), (_, prompts) = own.translator(), seq2seq, causal
    for text in [*own.lines("source")[:9], "", "  two  spaces ", "</s> <pad>", "ü雪"]:
        assert tokenizer(text).input_ids == [*ours.source_vocabulary.encode(text), ours.source_vocabulary.eos_id]
        assert prompts(text).input_ids == [prompts.bos_token_id, *own.generator().vocabulary.encode(text)]
    for text in own.lines("target")[:9]:
        ids = tokenizer(text_target=text).input_ids
        assert ids == [*ours.target_vocabulary.encode(text), ours.target_vocabulary.eos_id]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == len(ours.source_vocabulary)


def test_pipelines(folders, seq2seq):
    texts = own.lines("source")[:3]
    pipe = transformers.pipeline("translation", model=str(folders / "translator-hf"), device="cpu")
    found = pipe(texts, max_new_tokens=14, num_beams=1)
    expected = own.translator()(texts, beam=1, max_length=14)
    assert [one["translation_text"] for one in found] == expected
    assert pipe(texts[0], max_new_tokens=14, num_beams=1) == [{"translation_text": expected[0]}]
    with pytest.raises(TypeError, match="is made of a string"):
        pipe.preprocess(3)
    pipe = transformers.pipeline("text-generation", model=str(folders / "generator-hf"), device="cpu")
    text = pipe("The boy", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert text.startswith("The boy")
    assert pipe.model.config.model_type == "tamis_causal_lm"


def test_the_trainer_learns(seq2seq, causal, tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    source, target = own.lines("source")[:16], own.lines("target")[:16]
    model, tokenizer = seq2seq
    pairs = [tokenizer(a, text_target=b) for a, b in zip(source, target, strict=True)]
    language, prompts = causal
    texts = [prompts(text) for text in source]
    for number, (learner, data, collate) in enumerate(
        (
            (model, pairs, transformers.DataCollatorForSeq2Seq(tokenizer, model)),
            (language, texts, transformers.DataCollatorForLanguageModeling(prompts, mlm=False)),
        )
    ):
        options = transformers.TrainingArguments(
            str(tmp_path / str(number)),
            max_steps=8,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            per_device_train_batch_size=16,
        )
        trainer = transformers.Trainer(learner, options, collate, data)
        trainer.train()
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        assert losses[-1] < losses[0] - 0.3


def test_the_loss_is_that_of_our_own_objective(seq2seq):
    model, tokenizer = seq2seq
    batch = transformers.DataCollatorForSeq2Seq(tokenizer, model)(
        [tokenizer(a, text_target=b) for a, b in zip(own.lines("source")[:3], own.lines("target")[:3], strict=True)]
    )
    ours = own.translator()
    labels = batch["labels"]
    read = torch.cat([torch.full((3, 1), 1), labels[:, :-1].masked_fill(labels[:, :-1] == -100, 0)], 1)
    logits = ours.model(batch["input_ids"], read)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(model(**batch).loss, expected)
    summed = model(**batch, num_items_in_batch=10).loss
    torch.testing.assert_close(summed, expected * (labels != -100).sum() / 10)


def test_a_cache_of_somebody_else(causal):
    model, tokenizer = causal
    fed = tokenizer(["The boy"], return_tensors="pt")
    with pytest.raises(TypeError, match="a TamisCache, got DynamicCache"):
        model(**fed, past_key_values=transformers.DynamicCache())


def test_what_cannot_be_called(seq2seq):
    model, _ = seq2seq
    with pytest.raises(ValueError, match="decoder_input_ids or labels"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="input_ids or encoder_outputs"):
        model(decoder_input_ids=torch.ones(1, 3, dtype=torch.long))


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        tamis.hf.to_transformers(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        tamis.hf.to_transformers(tmp_path)
    own.generator().save(tmp_path / "torn")
    (tmp_path / "torn" / "config.json").write_text('{"model": ["CausalLM"]}')
    with pytest.raises(ValueError, match="must hold one of"):
        tamis.hf.to_transformers(tmp_path / "torn")
