"""How a command of the command line fails: one line on standard error, and status 1."""

from typing import Never

import typer
from rich.console import Console
from rich.markup import escape

from longtake.api_schemas.problems import ProblemError

errors = Console(stderr=True)


def fail(why: str, error: Exception, out: Console = errors) -> Never:
    """Say why, and end the command."""
    out.print("[red]error:[/] " + escape(why), highlight=False, soft_wrap=True)
    raise typer.Exit(1) from error


def reason(error: OSError | ProblemError) -> str:
    """What went wrong with which file, or with which option."""
    if isinstance(error, ProblemError):
        _, _, option = (error.field or "").partition("trajectory.")
        return f"--{option.replace('_', '-')}: {error.detail}" if option else str(error)
    if error.filename is None or error.strerror is None:
        return str(error)
    if isinstance(error, FileNotFoundError):
        return f"no such file or folder: {error.filename}"
    return f"{error.filename}: {error.strerror}"
