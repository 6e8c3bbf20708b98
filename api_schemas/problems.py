"""Problems (RFC 9457): one closed table of codes, the wire model and the exception that carries one.

Importable without torch, redis or fastapi: camera, video and engine code raise `ProblemError`; the routes render it.
"""

from collections.abc import Mapping
from http import HTTPStatus

from pydantic import BaseModel, ConfigDict

MEDIA_TYPE = "application/problem+json"

PROBLEMS: dict[str, tuple[HTTPStatus, str]] = {
    "invalid_request": (HTTPStatus.UNPROCESSABLE_ENTITY, "The request is not valid"),
    "malformed_json": (HTTPStatus.BAD_REQUEST, "The body is not JSON"),
    "malformed_body": (HTTPStatus.BAD_REQUEST, "The body can not be taken apart"),
    "unsupported_media_type": (
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "The body has another media type than this route takes",
    ),
    "not_acceptable": (HTTPStatus.NOT_ACCEPTABLE, "None of the accepted media types can be produced"),
    "range_not_satisfiable": (HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "The range lies outside the file"),
    "payload_too_large": (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The body is larger than this server takes"),
    "image_invalid": (HTTPStatus.UNPROCESSABLE_ENTITY, "The first frame is not a readable image"),
    "image_too_large": (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The image has more pixels than this server takes"),
    "frames_invalid": (HTTPStatus.UNPROCESSABLE_ENTITY, "The uploaded frames can not be read"),
    "frames_too_large": (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The uploaded frames are more than this server takes"),
    "poses_invalid": (HTTPStatus.UNPROCESSABLE_ENTITY, "A camera pose is not a rigid transform"),
    "intrinsics_invalid": (HTTPStatus.UNPROCESSABLE_ENTITY, "The camera intrinsics are not valid"),
    "actions_invalid": (HTTPStatus.UNPROCESSABLE_ENTITY, "The action string is not valid"),
    "trajectory_invalid": (HTTPStatus.UNPROCESSABLE_ENTITY, "The trajectory file can not be read"),
    "trajectory_exhausted": (HTTPStatus.UNPROCESSABLE_ENTITY, "The trajectory has no poses left"),
    "idempotency_key_reused": (HTTPStatus.UNPROCESSABLE_ENTITY, "The Idempotency-Key was used with another request"),
    "unauthorized": (HTTPStatus.UNAUTHORIZED, "This server asks for an API key"),
    "forbidden": (HTTPStatus.FORBIDDEN, "This server does not answer here"),
    "not_found": (HTTPStatus.NOT_FOUND, "There is nothing at this address"),
    "method_not_allowed": (HTTPStatus.METHOD_NOT_ALLOWED, "This address does not answer that method"),
    "session_not_found": (HTTPStatus.NOT_FOUND, "There is no such session"),
    "chunk_not_found": (HTTPStatus.NOT_FOUND, "The session has no such chunk"),
    "model_not_found": (HTTPStatus.NOT_FOUND, "This server does not serve that model"),
    "chunk_conflict": (HTTPStatus.CONFLICT, "The session does not stand where the request expects it"),
    "pending_conflict": (HTTPStatus.CONFLICT, "Poses are waiting for a whole chunk"),
    "in_progress": (HTTPStatus.CONFLICT, "A request with this Idempotency-Key is still running"),
    "session_fenced": (HTTPStatus.CONFLICT, "The session was taken over meanwhile"),
    "session_busy": (HTTPStatus.CONFLICT, "Another server works on this session"),
    "state_rolled_back": (HTTPStatus.CONFLICT, "The session store has lost chunks that were committed"),
    "rewound": (HTTPStatus.CONFLICT, "Chunks of this request were rewound away"),
    "chunk_expired": (HTTPStatus.GONE, "The chunk lies behind the retention horizon"),
    "model_mismatch": (HTTPStatus.CONFLICT, "The session was made with other weights"),
    "state_diverged": (HTTPStatus.CONFLICT, "The restored state is not the one that was committed"),
    "exactness_required": (HTTPStatus.CONFLICT, "This server can not restore the session to the bit"),
    "state_corrupt": (HTTPStatus.INTERNAL_SERVER_ERROR, "Stored data of the session is damaged"),
    "internal_error": (HTTPStatus.INTERNAL_SERVER_ERROR, "The server failed"),
    "queue_full": (HTTPStatus.SERVICE_UNAVAILABLE, "All places in the queue are taken"),
    "store_unavailable": (HTTPStatus.SERVICE_UNAVAILABLE, "The session store does not answer"),
    "store_full": (HTTPStatus.INSUFFICIENT_STORAGE, "The session store is full"),
    "shutting_down": (HTTPStatus.SERVICE_UNAVAILABLE, "The server is shutting down"),
}
"""Every problem code with its HTTP status and title. Codes are stable; details may change."""


class FieldProblem(BaseModel):
    """One field that is wrong, and why; the offending value is never repeated."""

    field: str
    detail: str


class Problem(BaseModel):
    """Body of every error answer, `application/problem+json`. Some codes add members of their own."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str
    errors: list[FieldProblem] = []


class ProblemError(Exception):
    """A request that can not be carried out.

    Args:
        code: key of `PROBLEMS`.
        detail: what is wrong, without repeating the input.
        field: dotted path of the field at fault, such as `camera.poses[3]`.
        retry_after: seconds, sent as `Retry-After`.
        extra: further members of the problem body.
    """

    def __init__(
        self,
        code: str,
        detail: str,
        field: str | None = None,
        *,
        retry_after: int | None = None,
        extra: Mapping[str, int | str] | None = None,
    ) -> None:
        super().__init__(detail if field is None else f"{field}: {detail}")
        self.code = code
        self.detail = detail
        self.field = field
        self.retry_after = retry_after
        self.extra = dict(extra or {})

    def problem(self) -> Problem:
        """The wire form."""
        status, title = PROBLEMS[self.code]
        errors = [] if self.field is None else [FieldProblem(field=self.field, detail=self.detail)]
        return Problem(
            type=f"urn:longtake:problem:{self.code}",
            title=title,
            status=status,
            code=self.code,
            detail=self.detail,
            errors=errors,
            **self.extra,
        )
