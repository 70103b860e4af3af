"""Nasty text through all that reads text: preparing, training, decoding, analysing, report and explore."""

from __future__ import annotations

import http.client
import json
import random
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hostile.children import Child, Outcome, run, tamis
from hostile.harness import Part, WrongError
from hostile.worlds import RECIPES

SCRIPT = "<script>alert(1)</script>"
STRINGS = (
    "", " ", "\t", "a\tb\tc", "\x00", "a\x00b", "\x1b[31mred", "\x7f\x08", "\r", "a\rb", "\ufeffa", "\u2028\x85",
    "\u202eabc\u202c", "\u05e9\u05dc\u05d5\u05dd", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "e" + "\u0301" * 300,
    "\u200b\u200b", "\uffff\U0010ffff", SCRIPT, "</script>" + SCRIPT, "<img src=x onerror=alert(1)>", "<!--<![CDATA[",
    "'\"><svg/onload=alert(1)>", "&lt;&amp;&#0;", "${x} {{x}} %s %n \\u0000 \\", "<s> </s> <unk> <pad>", "\u2581\u2581",
    "$\\frac{1}{0}$", "../../etc/passwd", "a " * 3000, "ab" * 20_000, "x" * 10**6, "\u4e00" * 500, "1" * 400, "| a |",
)  # fmt: skip
BYTES = (b"\xff\xfe\x00", b"\xed\xa0\x80", b"\xc3", b"\xf8\x88\x80\x80\x80", b"a\xc0\x80b", b"\xe2\x80")
NASTY: tuple[bytes, ...] = (*(text.encode() for text in STRINGS), *BYTES)
PLAIN = ("the old man reads a newspaper", "a small dog sleeps in the garden", "we see three red houses")
FILES = {
    "translation": {
        'train = "grammar:train:60"': 'train = ["train.src", "train.tgt"]',
        'valid = "grammar:valid:6"': 'valid = ["valid.src", "valid.tgt"]',
        'test = "grammar:test:4"': 'test = ["valid.src", "valid.tgt"]',
        'gold = "grammar:test:4"\n': "",
        "size = 110": 'size = 120\nbyte_fallback = true\ncharacter_coverage = 0.98\nkind = "bpe"',
        'kind = "bpe"\n[dec': "[dec",
    },
    "language": {
        'train = "grammar:train:64"': 'train = "train.src"',
        'valid = "grammar:valid:16"': 'valid = "valid.src"',
        'test = "grammar:test:32"': 'test = "valid.src"',
    },
}
"""What is different in a recipe of a kind that reads files."""


class Text(Part):
    name = "text"
    share = 1.0

    def begin(self) -> None:
        import tamis.report.live.server  # noqa: F401  # children have it then

    def trial(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        kind = draw.choice([*FILES])
        recipe = RECIPES[kind]
        for before, after in FILES[kind].items():
            recipe = recipe.replace(before, after)
        (folder / "recipe.toml").write_text(recipe)
        for name in ("train", "valid"):
            lines = written(draw, 60 if name == "train" else 8)
            if name == "valid":  # of which every token is looked at: minutes, for a million of them
                lines = [line[:400] for line in lines]
            (folder / f"{name}.src").write_bytes(joined(lines))
            (folder / f"{name}.tgt").write_bytes(joined(draw.sample(lines, len(lines))))
        run_it = self._asked(folder, counts)
        trained = run_it("train", "recipe.toml", "--output", "run", "--device", "cpu", "--set", "training.steps=2")
        if trained.code:
            return
        lines = written(draw, 6)
        (folder / "text.txt").write_bytes(joined(lines))
        if kind == "translation":
            said = run_it("translate", "run", "text.txt", "--output", "out.txt", "--alignments", "--device", "cpu")
        else:
            said = run_it(
                "generate", "run", "text.txt", "--output", "out.txt", "--set", "max_length=4", "--device", "cpu"
            )
        if said.code == 0 and (folder / "out.txt").read_bytes().count(b"\n") != len(lines):
            raise WrongError(f"{kind}: {len(lines)} lines become others\n{lines}")
        run_it("evaluate", "run", "--device", "cpu")
        analysed = run_it("analyze", "run", "--device", "cpu", "--shown", 4)
        if analysed.code == 0 and run_it("report", "run", "--title", f"</script>{SCRIPT}").code == 0:
            check_page((folder / "report.html").read_text())
        self._explored(draw, folder, counts)

    def _asked(self, folder: Path, counts: Counter[str]) -> Any:
        def run_it(*words: object) -> Outcome:
            outcome = run(tamis(*words), folder)
            outcome.check(0, 1, what=f"{words[0]} with nasty text")
            counts["commands with nasty text"] += 1
            counts["clear errors"] += outcome.code == 1
            return outcome

        return run_it

    def _explored(self, draw: random.Random, folder: Path, counts: Counter[str]) -> None:
        """The live page answers whatever is typed, by an answer or by a message."""
        texts = [line.decode(errors="replace") for line in draw.sample(NASTY, 4)] + ["\ud800"]
        child = Child(lambda: typed(texts), folder)
        outcome = child.wait()
        outcome.check(0, what=f"explore with {[text[:40] for text in texts]}")
        counts["texts typed into explore"] += len(texts)


def written(draw: random.Random, number: int) -> list[bytes]:
    """Some plain lines, and some that are not."""
    share = draw.choice((0.1, 0.3, 0.3, 1.0))
    return [draw.choice(NASTY) if draw.random() < share else draw.choice(PLAIN).encode() for _ in range(number)]


def joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def typed(texts: list[str]) -> None:
    """Ask a live page of the run in this folder."""
    from tamis.report.live.looking import Limits
    from tamis.report.live.models import load_subject
    from tamis.report.live.server import LiveServer, application

    subject = load_subject(Path("run"), "run", "cpu")
    with LiveServer(application([subject], Limits(tokens=200, written=8))) as server:
        port = int(server.address.rstrip("/").rpartition(":")[2])
        for text in texts:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body = json.dumps({"run": 0, "text": text}).encode()
            connection.request("POST", "/api/look", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = answer.read()
            if answer.status >= 500:
                raise SystemExit(f"error: {text!r:.60} is answered by {answer.status}: {found[:300]!r}")
            json.loads(found)
            connection.close()


class Scripts(HTMLParser):
    """Counts what runs in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: list[str] = []
        self.scripts: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script"
        self.handlers += [f"<{tag} {name}={value}>" for name, value in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


def check_page(page: str) -> None:
    """Raise if text of somebody else runs as a script."""
    found = Scripts()
    found.feed(page)
    if found.handlers or any(script.strip() == "alert(1)" for script in found.scripts):
        raise WrongError(
            f"report: text runs as a script\n{found.handlers} {[s for s in found.scripts if 'alert(1)' in s][:1]}"
        )
