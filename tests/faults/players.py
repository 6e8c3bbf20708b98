"""Clients of a chaos run. Each keeps what it was promised, and compares every answer with the truth at once."""

import base64
import hashlib
import io
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image

from faults.check import differing, fsck
from faults.cluster import Answer, Caller, Cluster, png
from faults.toy_model import FRAMES, HEIGHT, WIDTH
from faults.truth import PICTURE, Move, Truth, path
from longtake.state_cache import RedisStore

IMAGE = "data:image/png;base64," + base64.b64encode(png(PICTURE)).decode()


@dataclass
class Take:
    """A session of one client, and the truth about it. `gone` holds keys whose chunks were rewound away."""

    id: str
    truth: Truth
    turn: float
    gone: list[tuple[str, Move]] = field(default_factory=list)
    keys: list[tuple[str, Move, int]] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Of its resource."""
        return f"/v1/sessions/{self.id}"


class Player:
    """Owns sessions, and does one thing after the other to them."""

    def __init__(self, cluster: Cluster, seed: int, only: int | None = None) -> None:
        self.rng = random.Random(seed)
        self.caller = Caller(cluster, self.rng, only)
        self.takes: list[Take] = []
        self.deleted: list[str] = []
        self._cluster = cluster
        self._findings = cluster.findings
        self._model = cluster.model

    def step(self) -> None:
        """One thing, picked at random."""
        if not self.takes or (len(self.takes) < 3 and self.rng.random() < 0.2):
            self.takes.append(self.create())
            return
        take = self.rng.choice(self.takes)
        actions: list[tuple[float, Callable[[Take], object]]] = [
            (10, self.advance),
            (2, self.read),
            (2, self.fork_at_random),
            (2, self.rewind_at_random),
            (1, self.repeat),
            (0.5, self.delete),
        ]
        weights, choices = zip(*actions, strict=True)
        self.rng.choices(choices, weights)[0](take)

    def create(self) -> Take:
        """A new session."""
        seed, key, turn = self.rng.randrange(1000), self.caller.key(), self.rng.uniform(0.001, 0.02)
        body = {"image": IMAGE, "seed": seed, "prompt": "a beach"}
        answer = self.caller.call("POST", "/v1/sessions", body, key=key)
        if not self._is(answer, 201, "create"):
            raise RuntimeError(answer.content)
        take = Take(answer.json["id"], Truth.begun("a beach", seed, self._model), turn)
        self.check_session(take, answer)
        return take

    def advance(self, take: Take, move: Move | None = None, accept: str | None = None) -> Answer:
        """A request for chunks, checked; now and then as a video, or once more with the same key."""
        move = move or self.random_move(take)
        key = self.caller.key()
        before, take.truth = take.truth, take.truth.moved(move)
        accept = accept or ("video/mp4" if self.rng.random() < 0.15 else "application/json")
        answer = self.post(take, move, key, accept, before.next_chunk if self.rng.random() < 0.5 else None)
        take.history.append(f"{move.summary()} to {take.truth.next_chunk}, {accept}, {answer.attempts} attempts")
        if accept == "application/json":
            if self._is(answer, 201, "advance"):
                self.check_advanced(take, answer, before)
        else:
            self._findings.expect(answer.status in (200, 204), f"{take.id} video: {answer.status} {answer.content!r}")
        if len(take.truth.log) > len(before.log):
            take.keys.append((key, move, len(take.truth.log) - 1))
        if self.rng.random() < 0.15:
            again = self.post(take, move, key, accept, None)
            same = again.content == answer.content and (again.replayed or accept != "application/json")
            asked_otherwise = again.code == "idempotency_key_reused"
            self._findings.expect(same or asked_otherwise, f"{take.id}: a replay differs: {again.content[:300]!r}")
        return answer

    def post(self, take: Take, move: Move, key: str, accept: str, expected: int | None) -> Answer:
        """`POST …/chunks` until it is answered."""
        body = move.body() | ({} if expected is None else {"expected_chunk": expected})
        files = None if move.frames is None else [("frames", (f"{i}.png", png(x))) for i, x in enumerate(move.frames)]
        return self.caller.call("POST", f"{take.path}/chunks", body, key=key, accept=accept, files=files)

    def random_move(self, take: Take) -> Move:
        """Poses, keys or frames; few enough that several requests make a chunk, or many chunks in one."""
        frames = self.rng.choice([5, 24, 24, 24, 30, 48, 72])
        kind = self.rng.random()
        prompt = self.rng.choice(["rain", "snow", "a beach"]) if self.rng.random() < 0.1 else None
        pad = self.rng.random() < 0.1
        if kind < 0.6:
            return Move(poses=path(frames, take.truth.next_frame, take.turn), prompt=prompt, pad=pad)
        if kind < 0.85:
            return Move(actions=f"w-{frames // 2},{self.rng.choice(['dw', 'a', 's'])}-{frames - frames // 2}", pad=pad)
        start = FRAMES * take.truth.next_chunk + 1
        return Move(poses=path(FRAMES, start, take.turn), frames=_clip(self.rng))

    def read(self, take: Take) -> None:
        """Where it stands, and something of what it holds."""
        self.check_session(take, self.caller.call("GET", take.path))
        if take.truth.log:
            made = self.rng.choice(take.truth.log)
            chunk = self.caller.call("GET", f"{take.path}/chunks/{made.index}")
            if self._is(chunk, 200, "chunk"):
                self._same_chunk(take, chunk.json, made.index)
            self.check_frames(take, made.index)

    def fork_at_random(self, take: Take) -> None:
        """A fork, which becomes a session of this player."""
        last = self.rng.randrange(-1, len(take.truth.log))
        if len(self.takes) < 6:
            self.fork(take, last, self.rng.randrange(1000))

    def fork(self, take: Take, last: int, seed: int | None = None) -> Take:
        """A fork that shares the chunks up to `last`."""
        body = {"from_chunk": last} | ({} if seed is None else {"seed": seed})
        answer = self.caller.call("POST", f"{take.path}/fork", body, key=self.caller.key())
        if not self._is(answer, 201, "fork"):
            raise RuntimeError(answer.content)
        child = Take(answer.json["id"], take.truth.forked(last, seed), self.rng.uniform(0.001, 0.02))
        child.history = [*take.history, f"fork {last}, {answer.attempts} attempts"]
        self._findings.expect(answer.json["parent"] == take.id, f"{child.id} is not a fork of {take.id}")
        self.check_session(child, answer)
        self.takes.append(child)
        return child

    def rewind_at_random(self, take: Take) -> None:
        """A rewind of a few chunks, mostly."""
        if take.truth.log:
            last = max(-1, len(take.truth.log) - 1 - self.rng.randrange(1, 4))
            self.rewind(take, last, self.rng.randrange(1000))

    def rewind(self, take: Take, last: int, seed: int | None = None) -> Answer:
        """Drop the chunks behind `last`."""
        body = {"to_chunk": last} | ({} if seed is None else {"seed": seed})
        answer = self.caller.call("POST", f"{take.path}/rewind", body, key=self.caller.key())
        take.history.append(f"rewind {last}, {answer.attempts} attempts")
        if self._is(answer, 200, "rewind"):
            take.truth = take.truth.rewound(last, seed)
            self.check_session(take, answer)
            take.gone += [(key, move) for key, move, end in take.keys if end > last]
            take.keys = [each for each in take.keys if each[2] <= last]
        return answer

    def repeat(self, take: Take) -> None:
        """An old key: its chunks again, or the refusal that they were rewound away."""
        if take.gone:
            key, move = self.rng.choice(take.gone)
            answer = self.post(take, move, key, "application/json", None)
            known = answer.code in ("rewound", "idempotency_key_reused")
            self._findings.expect(known, f"{take.id}: a key rewound away answers {answer.status} {answer.content!r}")
        elif take.keys:
            key, move, _ = self.rng.choice(take.keys)
            answer = self.post(take, replace(move, pad=not move.pad), key, "application/json", None)
            self._findings.expect(
                answer.code == "idempotency_key_reused", f"{take.id}: a reused key answers {answer.content[:200]!r}"
            )

    def delete(self, take: Take) -> None:
        """Drop the session; it is not there afterwards."""
        answer = self.caller.call("DELETE", take.path)
        gone = answer.status == 204 or (answer.attempts > 1 and answer.code == "session_not_found")
        self._findings.expect(gone, f"{take.id}: delete answers {answer.status} {answer.content!r}")
        self.takes.remove(take)
        self.deleted.append(take.id)
        self._is(self.caller.call("GET", take.path), 404, "a deleted session")

    def settle(self, store: RedisStore) -> None:
        """Compare everything with the truth, once nothing fails any more."""
        for take in self.takes:
            self.check_session(take, self.caller.call("GET", take.path))
            self.check_log(take)
            fsck(store, take.id, self._findings, take.truth)
            if take.truth.log:
                self.check_frames(take, take.truth.log[-1].index)
        for session_id in self.deleted:
            self._is(self.caller.call("GET", f"/v1/sessions/{session_id}"), 404, "a deleted session")

    def check_session(self, take: Take, answer: Answer) -> None:
        """A session object against the truth."""
        if not self._is(answer, (200, 201), "session"):
            return
        found, truth = answer.json, take.truth
        must = {
            "id": take.id,
            "next_chunk": truth.next_chunk,
            "next_frame": truth.next_frame,
            "pending_poses": len(truth.pending),
            "revision": truth.revision,
            "seed": truth.seed,
            "prompt": truth.prompt,
        }
        wrong = {name: (found.get(name), value) for name, value in must.items() if found.get(name) != value}
        self._findings.expect(not wrong, f"{take.id} (found, truth): {wrong}")

    def check_advanced(self, take: Take, answer: Answer, before: Truth) -> None:
        """The answer to a request for chunks against the truth."""
        found, truth = answer.json, take.truth
        indices = [chunk["index"] for chunk in found["data"]]
        must = list(range(before.next_chunk, truth.next_chunk))
        if self._findings.expect(indices == must, f"{take.id}: chunks {indices} instead of {must}"):
            for chunk in found["data"]:
                self._same_chunk(take, chunk, chunk["index"])
        stands = (found["next_chunk"], found["next_frame"], found["pending_poses"])
        wanted = (truth.next_chunk, truth.next_frame, len(truth.pending))
        self._findings.expect(stands == wanted, f"{take.id}: stands at {stands} instead of {wanted}")

    def check_log(self, take: Take) -> None:
        """Every chunk as it is listed."""
        found: list[tuple[str, str]] = []
        after = -1
        while page := self.caller.call("GET", f"{take.path}/chunks?after={after}").json["data"]:
            found += [(chunk["frames_digest"], chunk["state_digest"]) for chunk in page]
            after = page[-1]["index"]
        must = [(made.frames_digest, made.state_digest) for made in take.truth.log]
        self._findings.expect(found == must, f"{take.id}: its chunks part from the truth {differing(found, must)}")

    def check_frames(self, take: Take, index: int) -> None:
        """Frames decoded again, and the video, of one chunk."""
        answer = self.caller.call("GET", f"{take.path}/chunks/{index}/frames")
        if self._is(answer, 200, "frames"):
            with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
                pixels = [np.asarray(Image.open(archive.open(name))) for name in archive.namelist()]
            digest = hashlib.sha256(np.stack(pixels).tobytes()).hexdigest()
            must = take.truth.log[index].frames_digest
            self._findings.expect(f"sha256:{digest}" == must, f"{take.id}: chunk {index} shows other frames")
        video = self.caller.call("GET", f"{take.path}/chunks/{index}/video")
        self._is(video, 200, "video")

    def _same_chunk(self, take: Take, chunk: dict[str, object], index: int) -> None:
        must = take.truth.log[index]
        same = (chunk["frames_digest"], chunk["state_digest"]) == (must.frames_digest, must.state_digest)
        history = " | ".join(take.history[-8:])
        self._findings.expect(same, f"{take.id}: chunk {index} is not the one that was asked for, after {history}")

    def _is(self, answer: Answer, status: int | tuple[int, ...], what: str) -> bool:
        statuses = (status,) if isinstance(status, int) else status
        return self._findings.expect(
            answer.status in statuses, f"{what} answers {answer.status}: {answer.content[:300]!r}"
        )


@dataclass(frozen=True)
class Try:
    """One request of a contest: chunks of poses from chunk `expected` on."""

    expected: int
    turn: float
    chunks: int


class Contest:
    """One session that several clients drive at once, each expecting a position: one wins each chunk."""

    def __init__(self, cluster: Cluster, seed: int, rivals: int = 3) -> None:
        owner = Player(cluster, seed)
        self._take = owner.create()
        self._owner = owner
        self._findings = cluster.findings
        self._callers = [Caller(cluster, random.Random(seed + 1 + n)) for n in range(rivals)]
        self._tries: list[Try] = []
        self._won: list[dict[int, str]] = []

    @property
    def rivals(self) -> int:
        """How many clients."""
        return len(self._callers)

    def step(self, rival: int) -> None:
        """One client looks where the session stands, and tries to go on from there."""
        caller = self._callers[rival]
        next_chunk = caller.call("GET", self._take.path).json["next_chunk"]
        attempt = Try(next_chunk, caller.rng.uniform(0.001, 0.02), caller.rng.choice([1, 1, 2, 3]))
        self._tries.append(attempt)
        body = {"camera": {"poses": path(FRAMES * attempt.chunks, FRAMES * next_chunk + 1, attempt.turn)}}
        answer = caller.call(
            "POST", f"{self._take.path}/chunks", {**body, "expected_chunk": next_chunk}, key=caller.key()
        )
        if answer.status == 201:
            self._won.append({chunk["index"]: chunk["state_digest"] for chunk in answer.json["data"]})
        else:
            lost = answer.code == "chunk_conflict"
            self._findings.expect(lost, f"contest {self._take.id}: {answer.status} {answer.content[:300]!r}")

    def settle(self, store: RedisStore) -> None:
        """Every chunk was won once, and is what its winner asked for."""
        winners: dict[int, str] = {}
        for won in self._won:
            for index, digest in won.items():
                self._findings.expect(index not in winners, f"contest {self._take.id}: chunk {index} was won twice")
                winners[index] = digest
        records = store.chunks(self._take.id, 0, 1 << 20)
        for index, digest in winners.items():
            kept = index < len(records) and records[index].state_digest == digest
            self._findings.expect(kept, f"contest {self._take.id}: chunk {index} is not the one that was acknowledged")
        self._take.truth = self._explained([record.state_digest for record in records])
        self._owner.takes = [self._take]
        self._owner.settle(store)

    def _explained(self, digests: list[str]) -> Truth:
        """The truth whose chunks were each asked for by somebody."""
        truth = self._take.truth
        for index, digest in enumerate(digests):
            asked = [each for each in self._tries if each.expected <= index < each.expected + each.chunks]
            made = [truth.moved(Move(poses=path(FRAMES, FRAMES * index + 1, each.turn))) for each in asked]
            same = [each for each in made if each.log[-1].state_digest == digest]
            if not self._findings.expect(bool(same), f"contest {self._take.id}: nobody asked for chunk {index}"):
                break
            truth = same[0]
        return truth


def _clip(rng: random.Random) -> np.ndarray:
    """Frames of a chunk that nobody else uploads."""
    return np.random.default_rng(rng.getrandbits(32)).integers(0, 255, (FRAMES, HEIGHT, WIDTH, 3), np.uint8)
