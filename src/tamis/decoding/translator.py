"""Text in, text out: a model with its vocabularies and its way of decoding."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from tamis.data.vocabulary import Vocabulary, load_vocabularies, save_vocabularies
from tamis.decoding.alignment import CrossAttention, forced_attention, padded
from tamis.decoding.folder import load_decoding, save_decoding
from tamis.decoding.quantized import check_quantize
from tamis.decoding.sampling import sample
from tamis.decoding.search import Hypothesis, beam_search, greedy
from tamis.decoding.settings import DecodingConfig
from tamis.decoding.state import bytes_of
from tamis.files import seal
from tamis.models.loading import model_folder
from tamis.models.seq2seq import Seq2Seq
from tamis.settings import choose_device

_log = logging.getLogger("tamis")

METHODS: dict[str, Callable[..., list[list[Hypothesis]]]] = {"beam": beam_search, "greedy": greedy, "sample": sample}
SEARCHED = 1 << 31
"""Bytes that the searches of a batch surely need, about."""
SPACED = str.maketrans("\n\r\t", "   ")

Progress = Callable[[int, int], None]
"""Called with how many sentences are done and how many there are."""


class Translation(NamedTuple):
    """One translation of a sentence."""

    text: str
    score: float
    """Sum of log-probabilities, that of the end included."""
    normalised: float
    """The score over the length penalty."""
    pieces: list[str]
    """The subwords."""
    finished: bool
    """Whether it has ended, rather than reached the length limit."""


class Translator:
    """Translates plain text.

    Args:
        model: stays on the device it is on.
        source_vocabulary, target_vocabulary: one and the same if the model shares its embeddings.
        decoding: the settings, each of which a call may override.
        batch_tokens: source tokens, with padding, that are translated at a time.
        quantize: "int8" or "bf16": translating multiplies in that precision, several times as fast on a CPU as in
            fp32 and with slightly other scores.  int8 has weights scaled per output and activations per token; both
            need the C++ kernels and a model in fp32 on the CPU.  `save`, `attention` and `align` use the model itself.
    """

    def __init__(
        self,
        model: Seq2Seq,
        source_vocabulary: Vocabulary,
        target_vocabulary: Vocabulary | None = None,
        decoding: DecodingConfig | None = None,
        *,
        batch_tokens: int = 4096,
        quantize: str | None = None,
    ) -> None:
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
        if quantize is not None:
            check_quantize(quantize, model)
        self.model, self.batch_tokens, self.quantize = model, batch_tokens, quantize
        self.source_vocabulary = source_vocabulary
        self.target_vocabulary = source_vocabulary if target_vocabulary is None else target_vocabulary
        self.decoding = DecodingConfig() if decoding is None else decoding
        self._check_vocabularies()

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device | None = None, **options: Any) -> Self:
        """Read a run folder (that holds model/) or a model folder; onto a GPU by default if there is one.

        A model folder holds config.json, model.safetensors, vocabulary.model or source.model and target.model, and may
        hold decoding.json.  Nothing in it is executed.
        """
        folder = model_folder(Path(path))
        place = choose_device(device)
        source, target = load_vocabularies(folder)
        decoding = load_decoding(folder)
        model = Seq2Seq.from_pretrained(folder)
        try:
            return cls(model.to(place).eval(), source, target, decoding, **options)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Write a model folder that `load` reads."""
        folder = Path(folder)
        self.model.save_pretrained(folder)
        save_vocabularies(folder, self.source_vocabulary, self.target_vocabulary)
        save_decoding(folder, self.decoding)
        seal(folder)

    def __call__(self, sentences: Sequence[str], *, progress: Progress | None = None, **overrides: Any) -> list[str]:
        """The best translation of each sentence.  `overrides` are settings of :class:`DecodingConfig`."""
        return [found[0].text for found in self.translate(sentences, progress=progress, **overrides)]

    def translate(
        self, sentences: Sequence[str], *, progress: Progress | None = None, **overrides: Any
    ) -> list[list[Translation]]:
        """Return the `n_best` translations of each sentence, in the order of the sentences; see :func:`beam_search`.

        A sentence without any text has one empty translation.  One longer than `max_source_length` is cut there, and a
        warning is logged.  Sentences of like length are translated together, `batch_tokens` at a time.
        """
        sentences = _texts("sentences", sentences)
        config = DecodingConfig.from_dict({**self.decoding.to_dict(), **overrides})
        sources = self._encoded(sentences, config.max_source_length)
        empty = [Translation("", 0.0, 0.0, [], True)]
        results = [empty] * len(sentences)
        waiting = [number for number, source in enumerate(sources) if len(source) > 1]
        done = len(sentences) - len(waiting)
        most = self._sentences_at_once(config)
        for batch in self._batches(waiting, [len(source) for source in sources], most):
            hypotheses = METHODS[config.method](
                self.model,
                padded([sources[number] for number in batch], self.model.config.pad_id, self.device),
                bos_id=self.target_vocabulary.bos_id,
                eos_id=self.target_vocabulary.eos_id,
                config=config,
                banned_ids=self._banned(),
                quantize=self.quantize,
            )
            for number, found in zip(batch, hypotheses, strict=True):
                results[number] = [self._translation(hypothesis) for hypothesis in found]
            done += len(batch)
            if progress is not None:
                progress(done, len(sentences))
        return results

    def attention(self, sources: Sequence[str], targets: Sequence[str]) -> list[CrossAttention]:
        """Return the cross-attention of each pair, all layers and heads, while the model is made to write the
        target."""
        sources, targets = _texts("sources", sources), _texts("targets", targets)
        if len(sources) != len(targets):
            raise ValueError(f"there must be as many targets as sources, got {len(targets)} and {len(sources)}")
        if not self.model.config.decoder_layers:
            raise ValueError("a model without decoder layers has no cross-attention")
        limit = self.decoding.max_source_length
        read = [self._spans(self.source_vocabulary, text, limit, number) for number, text in enumerate(sources)]
        written = [self._spans(self.target_vocabulary, text, limit, number) for number, text in enumerate(targets)]
        lengths = [max(len(a[0]), len(b[0])) for a, b in zip(read, written, strict=True)]
        weights: dict[int, torch.Tensor] = {}
        for batch in self._batches(list(range(len(sources))), lengths):
            pairs = [read[number][0] for number in batch], [written[number][0] for number in batch]
            special = self.target_vocabulary.bos_id, self.target_vocabulary.pad_id
            weights.update(zip(batch, forced_attention(self.model, *pairs, *special), strict=True))
        return [
            CrossAttention(
                source=self.source_vocabulary.pieces(read[number][0]),
                target=self.target_vocabulary.pieces(written[number][0]),
                source_spans=read[number][1],
                target_spans=written[number][1],
                weights=weights[number],
            )
            for number in range(len(sources))
        ]

    def align(
        self, sources: Sequence[str], targets: Sequence[str], *, layer: int | None = None, shifted: bool = False
    ) -> list[list[tuple[int, int]]]:
        """Word alignments of given translations: pairs (source word, target word); see :meth:`CrossAttention.links`."""
        attention = self.attention(sources, targets)
        texts = zip(attention, sources, targets, strict=True)
        return [found.links(source, target, layer=layer, shifted=shifted) for found, source, target in texts]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _translation(self, hypothesis: Hypothesis) -> Translation:
        # Spelled in bytes, a translation may hold what ends a line or a column.
        text = self.target_vocabulary.decode(hypothesis.tokens).translate(SPACED)
        pieces = self.target_vocabulary.pieces(hypothesis.tokens)
        return Translation(text, hypothesis.score, hypothesis.normalised, pieces, hypothesis.finished)

    def _encoded(self, sentences: Sequence[str], limit: int) -> list[list[int]]:
        """Ids with their end; the end alone for no text."""
        return [
            self._cut(self.source_vocabulary.encode(text), limit, number, self.source_vocabulary.eos_id)
            for number, text in enumerate(sentences)
        ]

    def _spans(self, vocabulary: Vocabulary, text: str, limit: int, number: int) -> tuple[list[int], Any]:
        ids, spans = vocabulary.spans(text)
        cut = self._cut(ids, limit, number, vocabulary.eos_id)
        return cut, spans[: len(cut) - 1]

    def _cut(self, ids: list[int], limit: int, number: int, eos_id: int) -> list[int]:
        if (known := self.model.config.position_limit()) is not None:
            limit = min(limit, known)
        if len(ids) >= limit:
            _log.warning("sentence %d has %d subwords: cut to %d", number + 1, len(ids), limit - 1)
        return [*ids[: limit - 1], eos_id]

    def _sentences_at_once(self, config: DecodingConfig) -> int:
        """However short they are: many hypotheses of a large vocabulary take more than their tokens do."""
        hypotheses = config.beam if config.method == "beam" else config.n_best
        return max(1, SEARCHED // bytes_of(hypotheses, self.model.config.vocab_size, config.max_extra))

    def _batches(self, numbers: list[int], lengths: Sequence[int], most: int = sys.maxsize) -> Iterator[list[int]]:
        """Those of like length together, the longest first: if memory is too small, that shows at once."""
        batch: list[int] = []
        for number in sorted(numbers, key=lambda number: -lengths[number]):
            if batch and (lengths[batch[0]] * (len(batch) + 1) > self.batch_tokens or len(batch) == most):
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _banned(self) -> list[int]:
        """What is no part of a text, and rows of the output layer that no piece belongs to."""
        vocabulary = self.target_vocabulary
        special = {vocabulary.pad_id, vocabulary.bos_id} - {vocabulary.eos_id}
        return [*sorted(special), *range(len(vocabulary), self.model.config.vocab_size)]

    def _check_vocabularies(self) -> None:
        config = self.model.config
        sizes = {"source": config.source_vocab_size or config.vocab_size, "target": config.vocab_size}
        for side, vocabulary in (("source", self.source_vocabulary), ("target", self.target_vocabulary)):
            if len(vocabulary) > sizes[side]:
                raise ValueError(
                    f"the {side} vocabulary has {len(vocabulary)} pieces, and the model embeds {sizes[side]}"
                )
        if self.source_vocabulary.pad_id != config.pad_id:
            pad = self.source_vocabulary.pad_id
            raise ValueError(f"the source vocabulary pads with {pad}, and the model with {config.pad_id}")


def _texts(name: str, texts: Sequence[str]) -> Sequence[str]:
    if isinstance(texts, str):
        raise TypeError(f"{name} must be a list of strings, got one string: put it in a list")
    texts = list(texts)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be strings, got {type(text).__name__}")
    return texts
