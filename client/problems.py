"""What a call can fail with, besides httpx's own errors when no server answers."""

import httpx
from pydantic import ValidationError

from longtake.api_schemas.problems import MEDIA_TYPE, Problem


class ServerProblem(Exception):
    """The server refused or failed.

    Attributes:
        problem: why, as the server says it; an answer from something else on the way has the code `http_<status>`.
        retry_after: seconds after which the server asks to be tried again, if it does.
    """

    def __init__(self, problem: Problem, retry_after: float | None = None) -> None:
        where = "; ".join(f"{error.field}: {error.detail}" for error in problem.errors)
        super().__init__(f"{where or problem.detail} [{problem.code}]")
        self.problem = problem
        self.retry_after = retry_after

    @property
    def code(self) -> str:
        """The stable code, such as `chunk_conflict`."""
        return self.problem.code


class ReplayError(Exception):
    """A stream that broke was asked for again, and what came is not what had come before."""


def problem_of(answer: httpx.Response) -> ServerProblem:
    """The problem that an answer, whose body has been read, stands for."""
    wait = answer.headers.get("retry-after", "")
    return ServerProblem(_problem(answer), float(wait) if wait.isdecimal() else None)


def _problem(answer: httpx.Response) -> Problem:
    if answer.headers.get("content-type", "").startswith(MEDIA_TYPE):
        try:
            return Problem.model_validate_json(answer.content)
        except ValidationError:
            pass
    status = answer.status_code
    title, detail = answer.reason_phrase or "Unexpected answer", f"{status} from {answer.url}, which is no problem+json"
    return Problem(type="about:blank", title=title, status=status, code=f"http_{status}", detail=detail)
