"""Server-sent events taken apart again."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """An event as it was sent; `what` is the chunk, or how far a rewind went."""

    name: str
    id: str | None = None
    data: dict[str, object] | None = None

    @property
    def what(self) -> tuple[str, object]:
        data = self.data or {}
        keys = {"chunk": "index", "rewound": "to_chunk", "progress": "stage", "error": "code"}
        return (self.name, data.get(keys.get(self.name, "")))


def parsed(piece: bytes) -> Seen:
    assert piece.endswith(b"\n\n")
    assert piece.count(b"\n\n") == 1
    fields = dict(line.split(": ", 1) for line in piece.decode("ascii").splitlines() if line.strip(":"))
    data = json.loads(fields["data"]) if "data" in fields else None
    return Seen(fields.get("event", "" if fields else "heartbeat"), fields.get("id"), data)
