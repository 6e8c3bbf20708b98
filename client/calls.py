"""Every call of the API as a value: the request to send, and how its answer is read. Nothing here waits or sends."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from longtake.api_schemas.camera import Camera
from longtake.api_schemas.resources import (
    Advanced,
    Chunk,
    ChunkList,
    CreateSession,
    Fork,
    ModelList,
    PostChunks,
    Readiness,
    Rewind,
    Session,
    SessionList,
)
from longtake.api_schemas.trajectory import TrajectoryOptions
from longtake.client.answers import content, model, nothing
from longtake.client.inputs import Beginning, File, Frames, Move, given, read, read_all, read_image, require_known
from longtake.client.problems import problem_of

T = TypeVar("T")
Part = tuple[str, tuple[str, bytes]]
Page = tuple[list[T], str | None]
"""Some of a list, and where the next page begins: None after the last."""

CONNECT_TIMEOUT_S = 10.0
EVENTS_TIMEOUT_S = 60.0
"""Four heartbeats of a server."""
CAMERA_FIELDS = frozenset(Camera.model_fields) - {"trajectory"}
POST_FIELDS = frozenset(PostChunks.model_fields) - {"camera"}


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, the same at every attempt.

    Attributes:
        method: HTTP method.
        path: path and query.
        parse: reads a successful answer.
        headers: further headers.
        body: JSON to send.
        files: parts to send beside it, as (part, (file name, bytes)).
        parsed_statuses: error statuses that `parse` reads as well.
        done_code: problem that, when the call is repeated, says that an earlier attempt was carried out.
        timeout: seconds without a byte after which an attempt has failed; None for those of the client.
    """

    method: str
    path: str
    parse: Callable[[httpx.Response], T]
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    files: tuple[Part, ...] = ()
    parsed_statuses: frozenset[int] = frozenset()
    done_code: str | None = None
    timeout: float | None = None

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The request, addressed to the server of `http`."""
        if self.files:
            return http.build_request(
                self.method, self.path, headers=self.headers, data={"params": self.body}, files=self.files
            )
        headers = {**self.headers, **({} if self.body is None else {"Content-Type": "application/json"})}
        timeout = http.timeout if self.timeout is None else _timeout(self.timeout)
        return http.build_request(self.method, self.path, headers=headers, content=self.body, timeout=timeout)

    def result(self, answer: httpx.Response, failures: int) -> T:
        """What an answer, whose body has been read, says after so many failed attempts. Raises `ServerProblem`."""
        if not (answer.is_success or answer.status_code in self.parsed_statuses):
            problem = problem_of(answer)
            if not failures or problem.code != self.done_code:
                raise problem
        return self.parse(answer)

    def resumed(self, count: int) -> Self:
        """The call again after `count` bytes came: a GET asks for the rest, a POST for everything."""
        if self.method != "GET" or not count:
            return self
        return replace(self, headers={**self.headers, "Range": f"bytes={count}-"})


class HttpOptions(TypedDict):
    """Arguments that httpx's two clients share."""

    base_url: str
    headers: dict[str, str]
    timeout: httpx.Timeout


def http_options(url: str, api_key: str | None, timeout: float) -> HttpOptions:
    """How to reach a server; `timeout` in seconds."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return {"base_url": url, "headers": headers, "timeout": _timeout(timeout)}


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=CONNECT_TIMEOUT_S)


def models() -> Call[ModelList]:
    """The models of the server."""
    return Call("GET", "/v1/models", model(ModelList))


def ready() -> Call[Readiness]:
    """Whether sessions can be served now; a server that is not ready says so with 503."""
    return Call("GET", "/readyz", model(Readiness), parsed_statuses=frozenset({503}))


def create(image: File, **beginning: Unpack[Beginning]) -> Call[Session]:
    """Begin a session."""
    require_known(beginning, Beginning)
    request = CreateSession.model_validate(given(beginning.items(), frozenset(CreateSession.model_fields)))
    headers = _keyed(beginning.get("key"))
    files = (("image", ("image", read_image(image))),)
    return Call("POST", "/v1/sessions", model(Session), headers, _json(request), files)


def session(session_id: str) -> Call[Session]:
    """Where a session stands."""
    return Call("GET", _session(session_id), model(Session))


def sessions(after: str | None) -> Call[Page[Session]]:
    """Some sessions, newest first."""

    def page(answer: httpx.Response) -> Page[Session]:
        found = SessionList.model_validate_json(answer.content)
        return found.data, found.next

    return Call("GET", "/v1/sessions" + _after(after), page)


def delete(session_id: str) -> Call[None]:
    """Drop a session."""
    return Call("DELETE", _session(session_id), nothing, done_code="session_not_found")


def fork(session_id: str, from_chunk: int, seed: int | None, key: str | None) -> Call[Session]:
    """A second session that goes on from a chunk."""
    request = Fork.model_validate(given({"from_chunk": from_chunk, "seed": seed}.items(), frozenset(Fork.model_fields)))
    return Call("POST", _session(session_id) + "/fork", model(Session), _keyed(key), _json(request))


def rewind(session_id: str, to_chunk: int, seed: int | None, key: str | None) -> Call[Session]:
    """Back to a chunk."""
    request = Rewind.model_validate(given({"to_chunk": to_chunk, "seed": seed}.items(), frozenset(Rewind.model_fields)))
    return Call("POST", _session(session_id) + "/rewind", model(Session), _keyed(key), _json(request))


def events(session_id: str, last_event_id: str | None) -> Call[None]:
    """What happens to a session, behind the event with this id."""
    headers = {"Accept": "text/event-stream"} | ({} if last_event_id is None else {"Last-Event-ID": last_event_id})
    return Call("GET", _session(session_id) + "/events", nothing, headers, timeout=EVENTS_TIMEOUT_S)


def generate(session_id: str, **move: Unpack[Move]) -> Call[Advanced]:
    """Generate the chunks that become whole."""
    return _advance(session_id, None, move, "application/json", model(Advanced))


def observe(session_id: str, frames: Frames, **move: Unpack[Move]) -> Call[Advanced]:
    """Absorb real frames, one pose each."""
    return _advance(session_id, frames, move, "application/json", model(Advanced))


def stream(session_id: str, frames: Frames | None, **move: Unpack[Move]) -> Call[None]:
    """The chunks that become whole as one MP4, chunk by chunk."""
    return _advance(session_id, frames, move, "video/mp4", nothing)


def chunks(session_id: str, after: str | None) -> Call[Page[Chunk]]:
    """Some chunks, in order."""

    def page(answer: httpx.Response) -> Page[Chunk]:
        found = ChunkList.model_validate_json(answer.content)
        return found.data, None if found.next is None else str(found.next)

    return Call("GET", _session(session_id) + "/chunks" + _after(after), page)


def chunk(session_id: str, index: int) -> Call[Chunk]:
    """One chunk."""
    return Call("GET", f"{_session(session_id)}/chunks/{index}", model(Chunk))


def chunk_video(session_id: str, index: int) -> Call[bytes]:
    """One chunk as an MP4."""
    return Call("GET", f"{_session(session_id)}/chunks/{index}/video", content)


def frames(session_id: str, index: int) -> Call[bytes]:
    """One chunk's frames, a zip of PNG."""
    return Call("GET", f"{_session(session_id)}/chunks/{index}/frames", content)


def latents(session_id: str, index: int) -> Call[bytes]:
    """One chunk's clean latents, a safetensors file."""
    return Call("GET", f"{_session(session_id)}/chunks/{index}/latents", content)


def video(session_id: str) -> Call[None]:
    """Everything so far as one MP4."""
    return Call("GET", _session(session_id) + "/video", nothing, {"Accept-Encoding": "identity"})


def _advance(
    session_id: str, frames: Frames | None, move: Move, accept: str, parse: Callable[[httpx.Response], T]
) -> Call[T]:
    require_known(move, Move)
    if move.get("options") is not None and move.get("trajectory") is None:
        raise TypeError("options say how a trajectory is read, and there is none")
    camera = given(move.items(), CAMERA_FIELDS)
    files: list[Part] = [("frames", ("frame", each)) for each in read_all(frames)]
    if (trajectory := move.get("trajectory")) is not None:
        camera["trajectory"] = move.get("options") or TrajectoryOptions()
        files.append(("trajectory", ("trajectory", read(trajectory))))
    if (cameras := move.get("cameras")) is not None:
        files.append(("cameras", ("cameras", read(cameras))))
    terms = given(move.items(), POST_FIELDS)
    request = PostChunks.model_validate({**terms, "camera": camera} if camera else terms)
    headers = {**_keyed(move.get("key")), "Accept": accept}
    return Call("POST", _session(session_id) + "/chunks", parse, headers, _json(request), tuple(files))


def _keyed(key: str | None) -> dict[str, str]:
    """The header that lets a request be sent twice and carried out once."""
    return {"Idempotency-Key": key or secrets.token_urlsafe(16)}


def _json(request: BaseModel) -> str:
    return request.model_dump_json(exclude_unset=True)


def _session(session_id: str) -> str:
    return f"/v1/sessions/{quote(session_id, safe='')}"


def _after(after: str | None) -> str:
    return "" if after is None else f"?after={quote(after, safe='')}"
