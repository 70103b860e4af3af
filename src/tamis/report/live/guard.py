"""Who may ask: pages of this server alone, by the names of this machine alone.

A page of another site that knows the port could send requests here (a browser does so for any page), or come by a name
of its own that it lets point to 127.0.0.1 (DNS rebinding).  The first shows in Origin and Sec-Fetch-Site, the
second in Host.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def refusal(method: str, path: str, headers: Mapping[str, str]) -> str | None:
    """Why a request is refused; None if it is not.  Any port is taken: `ssh -L` may have given it another."""
    host = headers.get("host", "")
    name = re.fullmatch(r"(\[::1\]|[^:]+)(?::\d{1,5})?", host)
    if name is None or name[1].lower() not in LOOPBACK:
        return "this server answers to localhost alone"
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        return "another page may not ask this server"
    followed = path == "/" and headers.get("sec-fetch-dest") == "document"  # a link to the page, from wherever
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and not followed:
        return "another page may not ask this server"
    if method == "POST" and headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        return "a request is JSON"
    return None


class Rate:
    """So many requests a second in the long run, and so many at once."""

    def __init__(self, per_second: float, at_once: int) -> None:
        self.per_second, self.at_once = per_second, float(at_once)
        self._left, self._since = float(at_once), time.monotonic()

    def take(self) -> bool:
        """Whether one more is allowed."""
        now = time.monotonic()
        self._left = min(self.at_once, self._left + (now - self._since) * self.per_second)
        self._since = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
