"""What stages say, kept instead of shown."""

from rich.console import Console

from tamis.training.journal import Display

QUIET = Display(quiet=True)


class Heard(Display):
    """Keeps every line."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)
