"""Begin a session: check everything, encode the first frame and the prompt, then write once."""

import base64
import hashlib
import re
import secrets
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import CreateSession, Session
from longtake.server.camera.intrinsics import Crop, check_intrinsics, default_intrinsics, intrinsics_warnings
from longtake.server.camera.poses import check_poses, to_opencv
from longtake.server.engine.command import request_fingerprint
from longtake.server.engine.keys import RunningKeys
from longtake.server.engine.plan import start_cursor
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.views import new_session_view
from longtake.server.engine.workers import Workers
from longtake.server.model.world import Conditions, Frames, ModelSpec, WorldModel
from longtake.server.video.images import read_first_frame, resize_crop
from longtake.state_cache import (
    Fingerprint,
    SessionExists,
    SessionNotFound,
    SessionRecord,
    failpoint,
    new_session_id,
    save_tensors,
)

_DATA_URL = re.compile(r"data:image/[a-z+.-]{1,32};base64,", re.ASCII)


@dataclass(frozen=True)
class FirstView:
    """The checked first frame and its camera: image uint8 [H,W,3] of the model's size, intrinsics [4] as given."""

    image: Frames
    first_pose: NDArray[np.float64]
    intrinsics: NDArray[np.float64]
    intrinsics_size: tuple[int, int]
    source_size: tuple[int, int]
    warnings: list[str]


class Creator:
    """Makes sessions."""

    def __init__(self, model: WorldModel, calls: StoreCalls, workers: Workers, ttl_s: int | None) -> None:
        self._model = model
        self._calls = calls
        self._workers = workers
        self._ttl_s = ttl_s
        self._keys = RunningKeys()

    async def create(
        self, request: CreateSession, image: bytes | None, key: str | None, owner: str
    ) -> tuple[Session, bool]:
        """The new session, or the one that an earlier request with this key made (then True). Raises `ProblemError`."""
        if request.model not in (None, self._model.spec.id):
            raise ProblemError("model_not_found", "this server does not serve that model", "model")
        with self._keys.claim(f"create {owner}", key), self._workers.admitted():
            view = await self._workers.read_picture(first_view, request, image, self._model.spec)
            session_id, claim = new_session_id(), None
            if key is not None:
                claim = hashlib.sha256(f"sessions\n{owner}\n{key}".encode()).hexdigest()
                mine = await self._workers.io(request_fingerprint, request, [image or b""])
                session_id = await claimed_id(self._calls, claim, mine, session_id)
                if (made := await self._calls.call(self._made, session_id)) is not None:
                    return made, True
            (conditions, warned), _ = await self._workers.compute(self._understand, view.image, request.prompt)
            view = replace(view, warnings=[*view.warnings, *warned])
            return await self._calls.call(self._write, request, session_id, claim, owner, view, conditions)

    def _understand(self, image: Frames, prompt: str) -> tuple[Conditions, list[str]]:
        """What the model makes of the first frame and the prompt, and what it says about that."""
        return self._model.condition(image, prompt), self._model.warnings(image, prompt)

    def _made(self, session_id: str) -> Session | None:
        """The session as it was created, if an earlier attempt has come so far."""
        try:
            session = self._calls.store.read(session_id)[0]
        except SessionNotFound:
            return None
        return new_session_view(session, self._model.spec)

    def _write(
        self,
        request: CreateSession,
        session_id: str,
        claim: str | None,
        owner: str,
        view: FirstView,
        conditions: Conditions,
    ) -> tuple[Session, bool]:
        store = self._calls.store
        session = SessionRecord(
            id=session_id,
            model=self._model.spec.id,
            fingerprint=Fingerprint(self._model.weights_fingerprint, self._model.numerics_fingerprint),
            prompt=request.prompt,
            seed=secrets.randbelow(2**31) if request.seed is None else request.seed,
            created_at=time.time(),
            first_pose=view.first_pose.ravel().tolist(),
            intrinsics=view.intrinsics.tolist(),
            intrinsics_size=view.intrinsics_size,
            source_size=view.source_size,
            conditions=save_tensors(store, session_id, conditions.to_tensors(), mend=True),
            warnings=view.warnings,
            create_key=claim,
            owner=owner,
            ttl_s=request.ttl_s or self._ttl_s,
        )
        try:
            failpoint("create.before")
            store.create(session, start_cursor(session))
            failpoint("create.after")
        except SessionExists:
            session = store.read(session_id)[0]
            return new_session_view(session, self._model.spec), True
        return new_session_view(session, self._model.spec), False


async def claimed_id(calls: StoreCalls, claim: str, fingerprint: str, session_id: str) -> str:
    """The id to make under a key, the same one for every attempt with it. Raises `idempotency_key_reused`."""
    first, session_id = await calls.call(calls.store.claim, claim, fingerprint, session_id)
    if first != fingerprint:
        raise ProblemError("idempotency_key_reused", "this key was used with another request", "Idempotency-Key")
    return session_id


def first_view(request: CreateSession, file: bytes | None, spec: ModelSpec) -> FirstView:
    """Check image, pose and intrinsics; bring the image to the model's size. Raises `ProblemError` naming the field."""
    image = read_first_frame(image_bytes(request.image, file), "image")
    size = (image.shape[1], image.shape[0])
    pose = np.eye(4) if request.first_pose is None else check_poses([request.first_pose], "first_pose")[0]
    intrinsics_size = request.intrinsics_size or size
    warnings: list[str] = []
    if request.intrinsics is None:
        intrinsics = default_intrinsics(*size)
        warnings.append("no intrinsics were given: a centred camera 60 degrees wide is assumed")
    else:
        checked = check_intrinsics([request.intrinsics], "intrinsics")
        warnings += intrinsics_warnings(checked, *intrinsics_size)
        intrinsics = checked[0]
    return FirstView(
        image=resize_crop(image, Crop.fit(*size, spec.width, spec.height)),
        first_pose=to_opencv(pose[None], request.convention)[0],
        intrinsics=intrinsics,
        intrinsics_size=intrinsics_size,
        source_size=size,
        warnings=warnings,
    )


def image_bytes(data_url: str | None, file: bytes | None) -> bytes:
    """The bytes of the first frame, from a data URL or a file part. Raises `invalid_request`, `image_invalid`."""
    if (data_url is None) == (file is None):
        raise ProblemError("invalid_request", "give the first frame as a data URL or as a file part", "image")
    if file is not None:
        return file
    assert data_url is not None
    match = _DATA_URL.match(data_url)
    if match is None:
        raise ProblemError("image_invalid", "give a data URL: data:image/png;base64,…", "image")
    try:
        return base64.b64decode(data_url[match.end() :], validate=True)
    except ValueError as error:
        raise ProblemError("image_invalid", "the data URL is not base64", "image") from error
