"""What every model of a request has in common: unknown members are refused, numbers are numbers."""

import difflib
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A number, not a word or a truth value that looks like one; neither NaN nor infinite."""

Whole = Annotated[int, Field(strict=True)]
"""A whole number, in the same sense."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that may have been meant, if one is near."""
    return next(iter(difflib.get_close_matches(name[:40], known, 1)), None)


class RequestModel(BaseModel):
    """A request, or a part of one. One unknown member is one error, however many there are, and it is not repeated."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    @model_validator(mode="before")
    @classmethod
    def _only_known_members(cls, data: object) -> object:
        if isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields:
                    near = nearest(str(name), cls.model_fields)
                    hint = f"did you mean {near}?" if near else f"known are: {', '.join(cls.model_fields)}"
                    raise ValueError(f"it has an unknown member; {hint}")
        return data
