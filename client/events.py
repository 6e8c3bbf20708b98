"""Server-sent events taken apart, line by line."""

from dataclasses import dataclass

import httpx

from longtake.api_schemas.events import EVENT_DATA, EventData, EventName


@dataclass(frozen=True)
class Event:
    """Something that happened to a session.

    Attributes:
        name: what: `chunk`, `rewound`, `progress`, `error` or `end`.
        data: the details, one type for each name.
        id: where to go on from, as `last_event_id`; None for what is in no log.
    """

    name: EventName
    data: EventData
    id: str | None = None


class EventReader:
    """Puts the lines of one stream after the other together; `last_id` is where the next one has to go on."""

    def __init__(self, last_id: str | None) -> None:
        self.last_id = last_id
        self.begin()

    def begin(self) -> None:
        """A stream begins; what was left of the one before is forgotten."""
        self._fields: dict[str, str] = {}

    def event(self, line: str) -> Event | None:
        """The event that this line completes; of a kind that is not known here, None."""
        if line:
            field, _, value = line.partition(":")
            self._fields[field] = value.removeprefix(" ")
            return None
        fields = self._fields
        self.begin()
        self.last_id = fields.get("id", self.last_id)
        for name, kind in EVENT_DATA.items():
            if name == fields.get("event"):
                return Event(name, kind.model_validate_json(fields["data"]), fields.get("id"))
        return None


def broken_off() -> httpx.RemoteProtocolError:
    """What it means when a stream ends before its session does: come again."""
    return httpx.RemoteProtocolError("the stream of events ended before the session")
