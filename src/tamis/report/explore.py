"""The live page of models: in a notebook, or by `tamis explore`."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis.report.live.looking import Limits
from tamis.report.live.models import load_hugging_face, load_subject, subjects_of
from tamis.report.live.subjects import Subject

if TYPE_CHECKING:
    from tamis.report.live.server import LiveServer

Folders = Sequence[Path] | Mapping[str, Path]


class LivePage:
    """A page that is open until `stop`; a notebook shows its address."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self.address = server.address

    def _repr_html_(self) -> str:
        shown = html.escape(self.address)
        return f'<a href="{shown}" target="_blank" rel="noreferrer">{shown}</a>'

    def __repr__(self) -> str:
        return f"LivePage({self.address!r})"

    def wait(self) -> None:
        """Until it is stopped."""
        self._server.wait()

    def stop(self) -> None:
        self._server.stop()

    def __enter__(self) -> LivePage:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def explore(models: Any, *, tokenizer: Any = None, port: int = 0, limits: Limits | None = None) -> LivePage:
    """Open a page on this machine to type into: what a model answers, and what its heads attend to.

    Args:
        models: a `Translator`, a `TextGenerator`, a `CausalLM`, a model of transformers, or several by name.
        tokenizer: of a model of transformers; without one, tokens are typed as numbers.
        port: of this machine; by default one that is free.
        limits: how long texts and answers may be, and how long one look may take.

    Returns:
        the page, which is open until `stop`.
    """
    return _opened(subjects_of(models, tokenizer), port, limits or Limits())


def serve(folders: Folders, hugging_face: Folders, port: int, *, device: str | None = None, **limits: Any) -> None:
    """The page of models in folders, until somebody interrupts it."""
    subjects = [load_subject(path, name, device) for name, path in _named(folders)]
    subjects += [load_hugging_face(path, name, device) for name, path in _named(hugging_face)]
    names = [subject.name for subject in subjects]
    if not subjects or len(set(names)) < len(names):
        raise ValueError(f"name one or more models that are called differently, NAME=FOLDER, got {names}")
    with _opened(subjects, port, Limits(**limits)) as page:
        port = int(page.address.rstrip("/").rpartition(":")[2])
        print(
            f"{page.address}  (interrupt to stop; from another machine: ssh -L {port}:127.0.0.1:{port} HOST)",
            flush=True,
        )
        try:
            page.wait()
        except KeyboardInterrupt:
            print("stopped")


def _opened(subjects: Sequence[Subject], port: int, limits: Limits) -> LivePage:
    from tamis.report.live.server import LiveServer, application

    title = "Heads of " + ", ".join(subject.name for subject in subjects)
    return LivePage(LiveServer(application(subjects, limits, title=title), port))


def _named(folders: Folders) -> list[tuple[str, Path]]:
    if isinstance(folders, Mapping):
        return list(folders.items())
    whole = [path.resolve() for path in folders]
    # The model of a run is called as its run is.
    return [
        (one.parent.name if one.name == "model" else one.name, path) for one, path in zip(whole, folders, strict=True)
    ]
