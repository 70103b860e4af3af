"""What people see of work that takes long: bars on a terminal, lines with the time to go in a log."""

import io

import pytest
from rich.console import Console

from tamis.training import journal
from tamis.training.journal import Display, Pace


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(journal, "time", made)
    return made


def display(terminal):
    return Display(Console(file=io.StringIO(), force_terminal=terminal, width=100))


def test_a_log_has_lines_now_and_then_with_the_time_to_go(clock):
    shown = display(terminal=False)
    with shown.track("encoding train", 40) as advance:
        for done in range(1, 41):
            clock.now += 1.0
            advance(done)
    assert shown.console.file.getvalue().splitlines() == [
        "encoding train: 10 of 40  ETA 0:00:30",
        "encoding train: 20 of 40  ETA 0:00:20",
        "encoding train: 30 of 40  ETA 0:00:10",
        "encoding train: 40 of 40  ETA 0:00:00",
    ]


def test_what_nobody_knows_the_end_of_has_no_time_to_go(clock):
    shown = display(terminal=False)
    with shown.track("encoding valid") as advance:
        clock.now += 11.0
        advance(1234)
    assert shown.console.file.getvalue() == "encoding valid: 1,234\n"


def test_a_terminal_has_a_bar():
    shown = display(terminal=True)
    with shown.track("evaluating", 4) as advance:
        for done in range(1, 5):
            advance(done)
    text = shown.console.file.getvalue()
    assert "evaluating" in text
    assert "4/4" in text
    assert "0:00:00" in text


def test_lines_of_training_have_the_time_to_go(clock):
    shown = display(terminal=False)
    shown.start("run", 100, 300)  # it went on from step 100
    clock.now += 50.0
    shown.show({"step": 200, "loss": 1.5})
    assert shown.console.file.getvalue() == "step    200/300  loss 1.500  ETA 0:00:50\n"


def test_there_is_no_pace_before_a_step():
    assert Pace(5, 10).left(5) == ""
