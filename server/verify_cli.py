"""The command line's `longtake sessions verify`: check a session where it is kept, without a server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from longtake.server.engine.verify import Progress, opened_for_verifying, verify
from longtake.server.settings import Settings


def run_verify(session: str, state_url: str | None, data_dir: Path | None, model: str | None, console: Console) -> bool:
    """Print what is wrong with a session, a line each, and a summary; returns whether all is well.

    Without a URL and a data directory it looks where the settings say. Raises `StartError` when the store or the model
    can not be had, `ProblemError` when there is no such session.
    """
    settings = Settings()
    if state_url is not None or data_dir is not None:
        where = {"state_url": state_url} | ({} if data_dir is None else {"data_dir": data_dir})
        settings = Settings.model_validate(settings.model_dump() | where)
    with opened_for_verifying(settings, session, model) as (store, served), _progress_line() as progress:
        report = verify(store, served, session, progress)
    for line in (*report.notes, *report.problems, f"{session}: {report.summary()}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return not report.problems


@contextmanager
def _progress_line() -> Iterator[Progress]:
    """A line on standard error that says how far it is; none where that is no terminal."""
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("chunks checked", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
