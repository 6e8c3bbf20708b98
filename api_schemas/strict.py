"""What every model of a request has in common: unknown members are refused, numbers are numbers."""

import difflib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A number, not a word or a truth value that looks like one; neither NaN nor infinite."""

Whole = Annotated[int, Field(strict=True)]
"""A whole number, in the same sense."""


class RequestModel(BaseModel):
    """A request, or a part of one. One unknown member is one error, however many there are, and it is not repeated."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    @model_validator(mode="before")
    @classmethod
    def _only_known_members(cls, data: object) -> object:
        if isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields:
                    near = difflib.get_close_matches(str(name)[:40], cls.model_fields, 1)
                    hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(cls.model_fields)}"
                    raise ValueError(f"it has an unknown member; {hint}")
        return data
