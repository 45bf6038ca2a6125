"""What every body that crosses the wire is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A request's or a reply's body; a field that is not known is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
