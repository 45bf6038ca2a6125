"""Pages from templates. All text is escaped and without control characters: agents wrote much of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agl_core.cli.words import harmless, number, one_line, plain, said_by, score, size, status_text
from agl_server.health.rollouts import show_message
from agl_view.charts import sparkline


def page_address(*parts: str, **query: Any) -> str:
    """The address of a page by the parts of its path; query values that are None or "" are left out.

    >>> page_address("runs", "a b/c", "rollouts", step=3, text=None)
    '/runs/a%20b%2Fc/rollouts?step=3'
    """
    encoded = urlencode({key: str(value) for key, value in query.items() if value not in (None, "")})
    path = "/" + "/".join(quote(part.encode("utf-8", "surrogatepass"), safe="") for part in parts)
    return path + (f"?{encoded}" if encoded else "")


def pretty(value: Any) -> str:
    """JSON for people; a text as it is."""
    return value if isinstance(value, str) else json.dumps(plain(value), indent=2, ensure_ascii=False)


def brief(value: Any) -> str:
    """A task's input on one line.

    >>> brief({"question": "6 * 7"}), brief({"city": "Oslo", "days": 2})
    ('6 * 7', 'city: Oslo, days: 2')
    """
    if isinstance(value, Mapping) and value:
        parts = [f"{key}: {brief(item)}" for key, item in value.items()]
        return brief(next(iter(value.values()))) if len(parts) == 1 else one_line(", ".join(parts), 240)
    return one_line(value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False), 240)


def shade(value: float | None, low: float, high: float) -> str:
    """The class of a reward's colour: from rw0 for the lowest to rw4 for the highest.

    >>> shade(0.0, 0.0, 1.0), shade(0.5, 0.0, 1.0), shade(None, 0.0, 1.0)
    ('rw0', 'rw2', 'rwx')
    """
    if value is None or not math.isfinite(value):
        return "rwx"
    return f"rw{min(4, int(5 * (value - low) / (high - low)))}" if high > low else "rw2"


def lean(value: float | None, most: float) -> str:
    """The class of an advantage's colour: its sign, and its size among those up to `most`.

    >>> lean(1.5, 1.5), lean(-0.1, 1.5), lean(0.0, 1.5), lean(None, 1.0)
    ('adv-up3', 'adv-down1', 'adv-zero', 'adv-none')
    """
    if value is None or not math.isfinite(value):
        return "adv-none"
    if abs(value) < 1e-12:
        return "adv-zero"
    return f"adv-{'up' if value > 0 else 'down'}{min(3, 1 + int(2.999 * abs(value) / most)) if most > 0 else 1}"


def _shown(value: Any) -> Any:
    return harmless(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def make_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("agl_view"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions: dict[str, Any] = {
        "address": page_address,
        "shade": shade,
        "lean": lean,
        "said_by": said_by,
        "status_text": status_text,
        "sparkline": sparkline,
    }
    environment.globals.update(functions)
    environment.filters.update(
        brief=brief, number=number, score=score, size=size, pretty=pretty, message_text=show_message, one_line=one_line
    )
    return environment
