"""What a page may ask for, read from JSON that anybody may have sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tamis.report.live.looking import Wish
from tamis.report.live.subjects import Subject

MOST_CHANGES = 1024
FIELDS = ("run", "text", "answer", "silent", "alphas")


def read_request(body: bytes, subjects: Sequence[Subject], most_characters: int) -> tuple[int, Wish]:
    """The number of a model and what to do with it; a ValueError that says what was expected."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError("a request is JSON in UTF-8") from error
    if not isinstance(given, dict) or not set(given) <= set(FIELDS):
        raise ValueError(f"a request has the fields {', '.join(FIELDS)} and no others")
    run = given.get("run")
    if type(run) is not int or not 0 <= run < len(subjects):
        raise ValueError(f"run must be a number from 0 to {len(subjects) - 1}")
    answer = given.get("answer")
    return run, Wish(
        text=_text("text", given.get("text"), most_characters),
        answer=None if answer is None else _text("answer", answer, most_characters),
        silent=tuple(_head(item) for item in _listed("silent", given.get("silent", []))),
        alphas=_alphas(_listed("alphas", given.get("alphas", []))),
    )


def _text(name: str, text: Any, most: int) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a string")
    if len(text) > most:
        raise ValueError(f"{name} may have {most:,} characters, this one has {len(text):,}")
    if "\0" in text:
        raise ValueError(f"{name} holds the character NUL, which no text has")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{name} holds half a surrogate pair, which no text has")
    if name == "text" and not text.strip():
        raise ValueError("there is no text yet")
    return text


def _listed(name: str, items: Any) -> list[Any]:
    if not isinstance(items, list) or len(items) > MOST_CHANGES:
        raise ValueError(f"{name} must be a list of at most {MOST_CHANGES} heads")
    return items


def _head(item: Any) -> tuple[str, int]:
    if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str) or type(item[1]) is not int:
        raise ValueError("a head is [site, number]")
    return item[0], item[1]


def _alphas(items: list[Any]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for item in items:
        if not isinstance(item, list) or len(item) != 3 or type(item[2]) not in (int, float):
            raise ValueError("an alpha is [site, head, number]")
        site, head = _head(item[:2])
        found.setdefault(site, {})[head] = float(item[2])
    return found
