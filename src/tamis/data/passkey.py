"""A number hidden in a long text, and asked for at its end: the passkey task, in words.

After Mohtashami and Jaggi 2023, https://arxiv.org/abs/2305.16300:

    The grass is green. The sky is blue. ... The pass key is 4 0 7 1 3. Remember it. 4 0 7 1 3 is the pass key. The
    grass is green. ... What is the pass key? The pass key is 4 0 7 1 3.

Digits stand apart, so that every vocabulary spells a number as so many digits.  As in `tamis.data.tasks` a hash of the
number says to which split it belongs: no number that is asked for in a test was ever trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tamis.data.tasks.base import ROUNDS, SPLITS, quarters
from tamis.data.vocabulary import Vocabulary

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = ("The pass key is", ". Remember it.", "is the pass key.")
QUESTION = "What is the pass key? The pass key is"


class PasskeyText:
    """Writes such texts as ids, of any length to the token.

    Args:
        digits: of the number.
    """

    def __init__(self, vocabulary: Vocabulary, digits: int = 5) -> None:
        self.vocabulary, self.digits = vocabulary, digits
        self._filler = vocabulary.encode(FILLER)
        self._needle = [vocabulary.encode(text) for text in NEEDLE]
        self._question = vocabulary.encode(QUESTION)
        self._digits = [vocabulary.encode(str(digit)) for digit in range(10)]
        missing = [str(digit) for digit, ids in enumerate(self._digits) if vocabulary.unk_id in ids]
        if missing:
            raise ValueError(
                f"pass keys need digits, and the vocabulary cannot spell {', '.join(missing)}: "
                f"set vocabulary.byte_fallback = true, or do without (passkey_share = 0, passkey_samples = 0)"
            )

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest number."""
        return self.digits * max(map(len, self._digits))

    @property
    def shortest(self) -> int:
        """Tokens of a document that holds nothing but the number and the question, whatever the number; bos and eos
        included."""
        frame = sum(map(len, self._needle)) + len(self._question) + 2
        return frame + 3 * self.longest_answer

    def answer(self, key: Sequence[int]) -> list[int]:
        """The ids of a number."""
        return [token for digit in key for token in self._digits[digit]]

    def draw(self, generator: torch.Generator, split: str = "train", count: int = 1) -> list[list[int]]:
        """Different numbers that belong to a split."""
        found: list[list[int]] = []
        for _ in range(ROUNDS):
            keys = torch.randint(10, (max(8, 4 * count), self.digits), generator=generator)
            kept = torch.isin(quarters(keys), torch.tensor(SPLITS[split]))
            for key in keys[kept].tolist():
                if key not in found:
                    found.append(key)
                if len(found) == count:
                    return found
        raise ValueError(
            f"there are no {count} different numbers of {self.digits} digits for {split}: take more digits"
        )

    def prompt(self, length: int, key: Sequence[int], depth: float) -> list[int]:
        """`length` tokens, bos to question; the number stands at `depth`, from 0 (the beginning) to 1 (the end)."""
        first, then, last = self._needle
        answer = self.answer(key)
        needle = [*first, *answer, *then, *answer, *last]
        room = length - 1 - len(needle) - len(self._question)
        if room < 0:
            raise ValueError(f"a pass key and its question take {length - room} tokens, and there are {length}")
        filler = (self._filler * (room // len(self._filler) + 1))[:room]
        place = round(depth * room)
        return [self.vocabulary.bos_id, *filler[:place], *needle, *filler[place:], *self._question]

    def document(self, length: int, generator: torch.Generator) -> list[int]:
        """A whole document to train on, `length` tokens from bos to eos, the number anywhere."""
        (key,) = self.draw(generator)
        depth = torch.rand((), generator=generator).item()
        answer = self.answer(key)
        return [*self.prompt(length - len(answer) - 1, key, depth), *answer, self.vocabulary.eos_id]
