"""Work in forked children of this process, which has imported everything and computed nothing: a start takes no time.

What a child does is told by how it ends: its exit code, and what it printed.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostile.harness import WrongError

PATIENCE = 300.0
"""Seconds after which a child hangs.  Children take a second or two here, on a busy machine many times that."""
LONGEST = 3000
"""Characters of an error message that somebody may be expected to read."""


@dataclass(frozen=True)
class Outcome:
    """How a child ended."""

    code: int
    """The exit code; the negative number of a signal."""
    out: str
    err: str
    hung: bool = False

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL and not self.hung

    def check(self, *codes: int, what: str) -> None:
        """Raise unless it ended with one of these codes, and with a clear message where that is not 0."""
        said = f"{self.out[-600:]}\n{self.err[-3000:]}"
        if self.hung:
            raise WrongError(f"{what} hangs\n{said}")
        if "Traceback (most recent call last)" in self.err + self.out:
            last = self.err.strip().rpartition("\n")[2]
            raise WrongError(f"{what}: a traceback: {last[:150]}\n{said}")
        if self.code not in codes:
            raise WrongError(f"{what}: exit code {self.code}, expected {' or '.join(map(str, codes))}\n{said}")
        if self.code == 1 and "error: " not in self.err:
            raise WrongError(f"{what}: exit code 1 without an error message\n{said}")
        if self.code == 2 and "Error: " not in self.err and "Usage: " not in self.err:
            raise WrongError(f"{what}: exit code 2 without a message\n{said}")
        message = self.err.rpartition("error: ")[2]
        if self.code == 1 and len(message) > LONGEST:
            raise WrongError(f"{what}: an error message of {len(message):,} characters\n{said}")


class Child:
    """A forked process that does `work` in the folder `where`."""

    def __init__(self, work: Callable[[], Any], where: Path, *, stdin: Path | None = None) -> None:
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115  # closed by `wait`
        sys.stdout.flush()
        sys.stderr.flush()
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(work, where, stdin)

    def _become(self, work: Callable[[], Any], where: Path, stdin: Path | None) -> None:
        code = 70
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(os.open(os.devnull if stdin is None else stdin, os.O_RDONLY), 0)
            os.dup2(self._out.fileno(), 1)
            os.dup2(self._err.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.chdir(where)
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def over(self) -> bool:
        """Whether it has ended; how, `wait` says."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, seconds: float = PATIENCE, kill_after: float | None = None) -> Outcome:
        """How it ends, at the latest by a SIGKILL so many seconds after it began."""
        until = self.began + (seconds if kill_after is None else kill_after)
        while True:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                break
            if time.monotonic() >= until:
                self.kill()
                _, status = os.waitpid(self.pid, 0)
                # It may have ended by itself just before.
                break
            time.sleep(0.002)
        code = os.waitstatus_to_exitcode(status)
        hung = kill_after is None and code == -signal.SIGKILL and time.monotonic() >= until
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        return Outcome(code, *texts, hung)


def tamis(*arguments: object, before: Callable[[], Any] = lambda: None) -> Callable[[], None]:
    """The command with these arguments, as work of a child."""

    def work() -> None:
        from tamis.cli import app

        words = list(map(str, arguments))
        sys.argv = ["tamis", *words]
        before()
        app(words, prog_name="tamis")

    return work


def run(work: Callable[[], Any], where: Path, **options: Any) -> Outcome:
    return Child(work, where, **options).wait()


# ---------------------------------------------------------------------------------------------------------------
# What happens to files below the folder of a child

CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.symlink", "os.link")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def watch(act: Callable[[int, str], None]) -> None:
    """Call `act` with a number and a path before each change of a file below this folder, and around each fsync."""
    here, real = os.getcwd() + os.sep, os.fsync
    number = 0

    def happens(path: str) -> None:
        nonlocal number
        number += 1
        act(number, path)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
            path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
            # Folders are emptied by names within a descriptor.
            within = event in ("os.remove", "os.rmdir") and arguments[1] != -1
            if path and (within or os.path.abspath(path).startswith(here)):
                happens(path)

    def fsync(file: Any) -> None:
        happens("fsync")
        real(file)
        happens("fsync")

    sys.addaudithook(hook)
    os.fsync = fsync


def kill_at(number: int) -> Callable[[], None]:
    """Be killed at a change of a file."""

    def act(now: int, path: str) -> None:
        if now == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: watch(act)


def fail_from(number: int, count: int, code: int) -> Callable[[], None]:
    """Some changes of files fail."""

    def act(now: int, path: str) -> None:
        if number <= now < number + count:
            raise OSError(code, os.strerror(code), path) if path != "fsync" else OSError(code, os.strerror(code))

    return lambda: watch(act)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
