"""The user's own checks of a version before it is served."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from agl_core.protocols import Release, ReleaseCheck


async def objections(checks: Mapping[str, ReleaseCheck], release: Release) -> list[str]:
    """What these checks, by their names, say against serving a version; a check that raises speaks against it too."""
    found = []
    for name, check in checks.items():
        try:
            said = check(release)
            said = await said if inspect.isawaitable(said) else said
        except Exception as error:
            said = f"it raised {type(error).__name__}: {error}"
        if said is not None:
            found.append(f"{name}: {said}")
    return found
