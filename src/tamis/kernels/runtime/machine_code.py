"""Whether a compiled kernel keeps what it was told to keep: the left operand of a product, in registers, over a loop.

ptxas 12.8, which Triton 3.6 brings along, gets some of these wrong: it puts another operand into the same registers and
uses that from the second turn of the loop on.  Nothing tells which kernels it spoils, so those that keep operands are
looked at before they run, and those that are spoilt run without keeping them (`launch.Launch`).
"""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import triton
from triton.runtime.cache import get_cache_manager

PRODUCT = re.compile(r"HGMMA\.64x(\d+)\S* R(\d+), (?:R(\d+), )?gdesc")
BRANCH = re.compile(r"BRA\b.*?`\((\.\w+)\)")
RESULT = re.compile(r"([A-Z0-9_.]+) (?:U?!?P[T\d]+, )*R(\d+)\b")
LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P[T\d]+ )?(.*?)\s*;")
NO_RESULT = re.compile(r"RET|CALL|BRX|BAR|WARPSYNC|R2P|NANOSLEEP|[A-Z]SETP|FCHK")
"""Their first register is one they read."""
FOUR, TWO = re.compile(r"\.128|\.MT?88\.4|[HI]MMA"), re.compile(r"\.64|\.WIDE|CS2R|\.MT?88\.2")
"""Whose results take so many registers."""
VERDICT = "operands-1.txt"


class Instruction(NamedTuple):
    text: str
    conditional: bool
    writes: range
    """Registers."""


@functools.cache
def is_spoilt(cubin: bytes) -> bool:
    """Whether a kernel's machine code loses an operand that it should keep; also where there is no way to tell.

    What was found is kept where Triton keeps its kernels: disassembling one takes up to a second.
    """
    cache = get_cache_manager(hashlib.sha256(cubin).hexdigest())
    known = cache.get_file(VERDICT)
    if known is None:
        spoilt = _disassembled_is_spoilt(cubin)
        if spoilt is None:
            return True
        cache.put(str(spoilt), VERDICT, binary=False)
        return spoilt
    return Path(known).read_text() != str(False)


def _disassembled_is_spoilt(cubin: bytes) -> bool | None:
    try:
        disassembler = triton.knobs.nvidia.nvdisasm.path
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [disassembler, "-c", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError):
        return None
    if LINE.search(text) is None:
        return None
    return next(lost_operands(text), None) is not None


def lost_operands(text: str) -> Iterator[str]:
    """Products whose left operand was written both within some loop and outside of it, so that it can be the right one
    only where the loop has not come to its end.  `text`: machine code as nvdisasm shows it."""
    code, labels = _parse(text)
    after = [_successors(code, labels, place) for place in range(len(code))]
    before: list[list[int]] = [[] for _ in code]
    for place, places in enumerate(after):
        for successor in places:
            before[successor].append(place)
    loops = [_loop(before, last, first) for last, places in enumerate(after) for first in places if first <= last]
    for place, instruction in enumerate(code):
        found = PRODUCT.match(instruction.text)
        if found is None or found[3] is None:
            continue
        for register in range(int(found[3]), int(found[3]) + 4):
            sources = _sources(code, before, place, register)
            if any(len({source in loop for source in sources}) == 2 for loop in loops):
                yield instruction.text
                break


def _parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = re.match(r"\s*(\.\w+):", line)
        if label:
            labels[label[1]] = len(code)
        elif found := LINE.search(line):
            code.append(Instruction(found[2], found[1] is not None, _writes(found[2])))
    return code, labels


def _writes(text: str) -> range:
    product, result = PRODUCT.match(text), RESULT.match(text)
    if product is not None:
        return range(int(product[2]), int(product[2]) + int(product[1]) // 2)
    if result is None or NO_RESULT.match(result[1]):
        return range(0)
    wide = 4 if FOUR.search(result[1]) else 2 if TWO.search(result[1]) else 1
    return range(int(result[2]), int(result[2]) + wide)


def _successors(code: list[Instruction], labels: dict[str, int], place: int) -> list[int]:
    text, conditional, _ = code[place]
    following = [place + 1] if place + 1 < len(code) else []
    branch = BRANCH.match(text)
    if branch is not None and branch[1] in labels:
        always = not conditional and re.match(r"BRA `", text) is not None
        return [labels[branch[1]], *([] if always else following)]
    return [] if text.startswith(("EXIT", "RET")) and not conditional else following


def _loop(before: list[list[int]], last: int, first: int) -> set[int]:
    """The places from which `last`, which goes back to `first`, is reached without passing there."""
    loop, waiting = {first, last}, [last]
    while waiting:
        place = waiting.pop()
        if place == first:
            continue
        for previous in before[place]:
            if previous not in loop:
                loop.add(previous)
                waiting.append(previous)
    return loop


def _sources(code: list[Instruction], before: list[list[int]], place: int, register: int) -> set[int]:
    """Where what a register holds at a place may have been written."""
    found, seen, waiting = set(), {place}, list(before[place])
    while waiting:
        previous = waiting.pop()
        if previous in seen:
            continue
        seen.add(previous)
        if register in code[previous].writes:
            found.add(previous)
            if not code[previous].conditional:
                continue
        waiting.extend(before[previous])
    return found
