"""Prompts and their embeddings: encoded once, stored with the chunks that they are in force for."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec
from torch import Tensor

from longtake.server.model.world import WorldModel
from longtake.state_cache import Arena, Cursor, SchemaError, SessionRecord, Store, load_tensors, save_tensors

R = TypeVar("R")

Text = tuple[Tensor, Tensor]
"""Text [1,L,E] and its mask [1,L]."""


class TakeTurn(Protocol):
    """Runs something on the model when its turn comes, and waits for it."""

    def __call__(self, function: Callable[[], R], /) -> R:
        """What the function returns."""


def at_once(function: Callable[[], R], /) -> R:
    """Where nobody else wants the model."""
    return function()


def prompt_in_force(session: SessionRecord, cursor: Cursor) -> str:
    """The prompt that the next chunk would be made with."""
    return session.prompt if cursor.prompt is None else cursor.prompt


def changed_prompt_warnings(model: WorldModel, cursor: Cursor) -> list[str]:
    """What the model says of a prompt that is not the session's own, whose warnings the session has."""
    return [] if cursor.prompt is None else model.warnings(None, cursor.prompt)


def with_prompt(
    store: Store, model: WorldModel, session: SessionRecord, cursor: Cursor, prompt: str, take_turn: TakeTurn = at_once
) -> Cursor:
    """The cursor with this prompt in force.

    Its text is encoded and put into the store, where it stays once a commit names the cursor; not when the prompt is
    in force already, or is the session's own.
    """
    if prompt == prompt_in_force(session, cursor):
        return cursor
    if prompt == session.prompt:
        return msgspec.structs.replace(cursor, prompt=None, text=None)
    text, mask = take_turn(lambda: model.encode_prompt(prompt))
    return msgspec.structs.replace(cursor, prompt=prompt, text=save_text(store, session.id, text, mask))


def save_text(store: Store, session_id: str, text: Tensor, mask: Tensor) -> Arena:
    """Put a prompt's embedding into the store; it stays once a commit names it."""
    return save_tensors(store, session_id, {"text": text, "text_mask": mask}, mend=True)


def load_text(store: Store, session: SessionRecord, arena: Arena | None) -> Text:
    """Text that a cursor or a chunk names, None for the session's own.

    Raises `BlobsMissing`, `BlobCorrupt`, `SchemaError`.
    """
    tensors = load_tensors(store, session.id, session.conditions if arena is None else arena)
    if not {"text", "text_mask"} <= tensors.keys():
        raise SchemaError("the arena holds no text")
    return tensors["text"], tensors["text_mask"]
