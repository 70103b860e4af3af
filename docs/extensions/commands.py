"""The page about the command line, from the commands themselves: replaces `<!-- commands -->`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MARK, PAGE = "<!-- commands -->", "reference/commands"


def cell(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def described(name: str, command: Any) -> Iterator[str]:
    """Describe a command, and all commands of a group."""
    if hasattr(command, "commands"):
        for own in command.commands.values():
            yield from described(f"{name} {own.name}", own)
        return
    shown = [option for option in command.params if not getattr(option, "hidden", False) and option.name != "help"]
    arguments = [option for option in shown if option.param_type_name == "argument"]
    options = [option for option in shown if option.param_type_name != "argument"]
    usage = [name, *(["[OPTIONS]"] if options else []), *(argument.name.upper() for argument in arguments)]
    yield f"## {name}\n\n```text\n{' '.join(usage)}\n```"
    yield (command.help or "").replace("\b", "").strip()
    rows = [(f"`{argument.name.upper()}`", argument) for argument in arguments]
    rows += [(", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts)), option) for option in options]
    if rows:
        lines = ["| | Meaning | Default |", "|---|---|---|"]
        for label, option in rows:
            silent = option.default in (None, False, (), []) or callable(option.default)
            default = "" if silent else f"`{option.default}`"
            lines.append(f"| {label} | {cell(getattr(option, 'help', None) or '')} | {cell(default)} |")
        yield "\n".join(lines)


def read(app, name, source):
    if MARK in source[0]:
        import typer

        from tamis.cli import app as commands

        text = "\n\n".join(described("tamis", typer.main.get_command(commands)))
        source[0] = source[0].replace(MARK, text)


def always(app, env, added, changed, removed):
    """Read the page anew in every build: what it shows lies in code."""
    return [PAGE]


def setup(app):
    app.connect("env-get-outdated", always)
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
