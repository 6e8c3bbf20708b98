"""A small HTTP client, used by the command line."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Self, TypeVar

import httpx
from pydantic import BaseModel

from longtake.api_schemas.problems import Problem
from longtake.api_schemas.resources import Advanced, CreateSession, ModelList, PostChunks, Session, SessionList

M = TypeVar("M", bound=BaseModel)


class ServerProblem(Exception):
    """The server refused; `problem` says why."""

    def __init__(self, problem: Problem) -> None:
        where = "".join(f" ({error.field}: {error.detail})" for error in problem.errors)
        super().__init__(f"{problem.title}: {problem.detail}{where} [{problem.code}]")
        self.problem = problem


class Client:
    """Talks to one server. Not safe to share between threads.

    Args:
        url: base URL, such as http://127.0.0.1:8000.
        timeout: seconds without a byte until a call gives up.
    """

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def models(self) -> ModelList:
        """The models of the server."""
        return self._read("GET", "/v1/models", ModelList)

    def create(self, request: CreateSession, key: str | None = None) -> Session:
        """Begin a session."""
        return self._read("POST", "/v1/sessions", Session, request, key)

    def session(self, session_id: str) -> Session:
        """Where a session stands."""
        return self._read("GET", f"/v1/sessions/{session_id}", Session)

    def sessions(self) -> Iterator[Session]:
        """All sessions, newest first."""
        after: str | None = ""
        while after is not None:
            page = self._read("GET", "/v1/sessions" + (f"?after={after}" if after else ""), SessionList)
            yield from page.data
            after = page.next

    def advance(self, session_id: str, request: PostChunks, key: str | None = None) -> Advanced:
        """Post poses or actions and wait for the chunks."""
        return self._read("POST", f"/v1/sessions/{session_id}/chunks", Advanced, request, key)

    def delete(self, session_id: str) -> None:
        """Drop a session."""
        self._send("DELETE", f"/v1/sessions/{session_id}")

    def save_video(self, session_id: str, path: Path) -> None:
        """Write everything so far to an MP4 file."""
        with self._http.stream("GET", f"/v1/sessions/{session_id}/video") as answer:
            if answer.is_error:
                answer.read()
                raise _problem(answer)
            with path.open("wb") as file:
                for piece in answer.iter_bytes():
                    file.write(piece)

    def _read(self, method: str, path: str, kind: type[M], body: BaseModel | None = None, key: str | None = None) -> M:
        return kind.model_validate_json(self._send(method, path, body, key).content)

    def _send(self, method: str, path: str, body: BaseModel | None = None, key: str | None = None) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        content = None if body is None else body.model_dump_json(exclude_none=True)
        if content is not None:
            headers["Content-Type"] = "application/json"
        answer = self._http.request(method, path, content=content, headers=headers)
        if answer.is_error:
            raise _problem(answer)
        return answer


def _problem(answer: httpx.Response) -> Exception:
    if answer.headers.get("content-type", "").startswith("application/problem+json"):
        return ServerProblem(Problem.model_validate_json(answer.content))
    return httpx.HTTPStatusError(f"{answer.status_code} from {answer.url}", request=answer.request, response=answer)


def image_url(path: Path) -> str:
    """An image file as the data URL that `CreateSession.image` takes."""
    kind = {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}.get(path.suffix.lower(), "png")
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
