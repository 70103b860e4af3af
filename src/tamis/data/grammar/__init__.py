"""The embedded corpus: English-German sentence pairs with gold word alignments, from a grammar.

One tree per sentence is spelled out in both languages at once, so that the links between the words are known, not
guessed.  See docs/grammar.md for what the sentences hold, how they are linked and what the splits keep apart.
"""

from tamis.data.grammar.corpus import SPLITS, generate
from tamis.data.grammar.example import Example

__all__ = ["SPLITS", "Example", "generate"]
