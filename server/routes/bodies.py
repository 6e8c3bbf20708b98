"""Request bodies: JSON, or multipart with the same JSON in the part `params` and files beside it."""

import email.message
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException

from longtake.api_schemas.problems import ProblemError
from longtake.server.routes.multipart import BYTES_AS_TEXT, WholeParser

M = TypeVar("M", bound=BaseModel)

MAX_FILES = 512
MAX_PARAMS_BYTES = 8 * 2**20
MAX_JSON_PARTS = 250_000
"""Commas and opening brackets of a JSON body: twice what 4,096 poses with intrinsics have. Parsing holds the whole
process, and a body of the size that a picture may have could hold tens of millions."""


@dataclass(frozen=True)
class Body:
    """A body taken apart: the JSON text, and the bytes of each file by the name of its part."""

    params: bytes
    files: dict[str, tuple[bytes, ...]]

    async def parsed(self, model: type[M]) -> M:
        """The JSON as `model`, read on a thread. Raises `RequestValidationError`, `payload_too_large`."""
        if sum(map(self.params.count, (b",", b"[", b"{"))) > MAX_JSON_PARTS:
            raise ProblemError(
                "payload_too_large", "the JSON has too many members", extra={"limit_parts": MAX_JSON_PARTS}
            )
        try:
            return await run_in_threadpool(model.model_validate_json, self.params)
        except ValidationError as error:
            found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_input=False)]
            raise RequestValidationError(found) from error

    def one(self, name: str) -> bytes | None:
        """The only file of this part, if there is one. Raises `ProblemError` when there are several."""
        files = self.files.get(name, ())
        if len(files) > 1:
            raise ProblemError("invalid_request", "give one file in this part", name)
        return files[0] if files else None


async def read_body(request: Request, parts: frozenset[str]) -> Body:
    """Read a JSON body, or a multipart one whose file parts are among `parts`.

    Raises `ProblemError`: `unsupported_media_type`, `malformed_body`, `invalid_request` naming the part.
    """
    kind = _media_type(request)
    if kind == "application/json":
        return Body(await request.body(), {})
    if kind != "multipart/form-data":
        raise ProblemError("unsupported_media_type", "send application/json or multipart/form-data")
    form = await _form(request)
    try:
        return await _from_form(form, parts)
    finally:
        await form.close()


def _media_type(request: Request) -> str:
    message = email.message.Message()
    message["content-type"] = request.headers.get("content-type", "")
    return message.get_content_type() if message["content-type"] else ""


async def _form(request: Request) -> FormData:
    async with aclosing(request.stream()) as stream:
        parser = WholeParser(request.headers, stream, max_files=MAX_FILES, max_fields=1, max_part_size=MAX_PARAMS_BYTES)
        try:
            return await parser.parse()
        except MultiPartException as error:
            raise ProblemError("malformed_body", error.message) from error


async def _from_form(form: FormData, parts: frozenset[str]) -> Body:
    params: bytes | None = None
    files: dict[str, tuple[bytes, ...]] = {}
    for name, value in form.multi_items():
        if name == "params":
            if params is not None:
                raise ProblemError("invalid_request", "give the JSON once", "params")
            params = await value.read() if isinstance(value, UploadFile) else value.encode(BYTES_AS_TEXT)
        elif name not in parts or not isinstance(value, UploadFile):
            detail = f"the file parts of this request are: {', '.join(sorted(parts))}; its JSON goes into params"
            raise ProblemError("invalid_request", detail, "body")
        else:
            files[name] = (*files.get(name, ()), await value.read())
    return Body(b"{}" if params is None else params, files)


def body_schema(model: type[BaseModel], parts: dict[str, str]) -> dict[str, object]:
    """The OpenAPI request body of a route that uses `read_body`: `parts` maps names to descriptions."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    files = {
        name: {"type": "string", "contentMediaType": "application/octet-stream", "description": text}
        for name, text in parts.items()
    }
    form = {"type": "object", "properties": {"params": reference, **files}, "required": ["params"]}
    content = {"application/json": {"schema": reference}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}
