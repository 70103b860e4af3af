"""Fonts for the scripts of some texts: the default one knows Latin, Greek, Cyrillic and Arabic, but no Japanese."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

_log = logging.getLogger("tamis")

DEFAULT = "DejaVu Sans"
PREFERRED = ("noto", "source han", "ipa", "takao", "wenquanyi", "unifont", "droid", "arial unicode")
"""Beginnings of the names of families that are made for text; others with a glyph may be for something else."""


@contextmanager
def fonts_for(texts: Iterable[str]) -> Iterator[None]:
    """Within it, matplotlib writes these texts with fonts that have their characters; a warning names what none has."""
    from matplotlib import rc_context

    families, missing = chosen({character for text in texts for character in text})
    for script, example in missing.items():
        _log.warning(
            "no font here has the %s characters of the text, such as %s: they are drawn as boxes; Noto has fonts "
            "for all scripts",
            script,
            example,
        )
    with rc_context({"font.family": families}):
        yield


def chosen(characters: set[str]) -> tuple[list[str], dict[str, str]]:
    """Families, the default one first, that have the characters, and an example of each script that none has.

    A family is taken for a script if it has more of its characters than any other.
    """
    own = coverage().get(DEFAULT, frozenset())
    wanted: dict[str, set[str]] = {}
    for character in characters:
        if ord(character) not in own and not _unseen(character):
            wanted.setdefault(script_of(character), set()).add(character)
    families, missing = [DEFAULT], {}
    for script, some in sorted(wanted.items()):
        codes = {ord(character) for character in some}
        best = max(coverage(), key=lambda name: (len(codes & coverage()[name]), _is_text(name), name))
        left = codes - coverage()[best]
        if len(left) < len(codes) and best not in families:
            families.append(best)
        if left:
            missing[script] = chr(min(left))
    return families, missing


@cache
def coverage() -> dict[str, frozenset[int]]:
    """The characters of every family that matplotlib finds here."""
    from matplotlib import font_manager

    found: dict[str, set[int]] = {}
    for entry in font_manager.fontManager.ttflist:
        if entry.style == "normal":
            try:
                found.setdefault(entry.name, set()).update(font_manager.get_font(entry.fname).get_charmap())
            except (OSError, RuntimeError):  # a file that is no font after all
                continue
    return {name: frozenset(codes) for name, codes in found.items()}


def script_of(character: str) -> str:
    """In words, from its name: "CJK", "HIRAGANA", "THAI"."""
    return unicodedata.name(character, "unnamed").split()[0].title().replace("Cjk", "CJK")


def _unseen(character: str) -> bool:
    return character.isspace() or unicodedata.category(character).startswith("C")


def _is_text(name: str) -> bool:
    return name.lower().startswith(PREFERRED)
