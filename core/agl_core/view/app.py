"""The application: its routes, its errors, and the guard in front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from agl_core.errors import AglError, ConfigError, StoreRefusedError
from agl_core.view.folders import RunFolders
from agl_core.view.pages import BadQueryError, Pages
from agl_core.view.run_page import run_page
from agl_core.view.security import Guard
from agl_core.view.several_runs import compare_page, overlay_page


def make_app(paths: Sequence[Path], token: str, operator_key: str | None = None) -> Starlette:
    """The pages about the runs at `paths`, each a run or a folder of runs, for browsers that have shown `token`.

    Browsers on other machines need the operator's key; without one they see nothing.
    """
    pages = Pages(RunFolders(paths))

    async def run(request: Request) -> Response:
        return await run_page(pages, request)

    async def overlay(request: Request) -> Response:
        return await overlay_page(pages, request)

    async def comparison(request: Request) -> Response:
        return await compare_page(pages, request)

    async def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return pages.render(request, "error.html", status=error.status_code, said="There is no such page.")
        status = 400 if isinstance(error, BadQueryError) else 404 if _is_missing(error) else 503
        return pages.render(request, "error.html", status=status, said=str(error))

    run_path = "/runs/{run}"
    return Starlette(
        routes=[
            Route("/", pages.runs),
            Route("/changed", pages.changed),
            Route("/overlay", overlay),
            Route("/compare", comparison),
            Route(run_path, run),
            Route(f"{run_path}/changed", pages.changed),
            Route(f"{run_path}/rollouts", pages.rollouts),
            Route(f"{run_path}/rollouts/{{id:path}}", pages.rollout),
            Route(f"{run_path}/groups/{{id:path}}", pages.group),
            Route(f"{run_path}/call", pages.call),
            Mount("/static", StaticFiles(packages=[("agl_core.view", "static")])),
        ],
        middleware=[Middleware(Guard, token=token, operator_key=operator_key)],
        exception_handlers={AglError: failed, HTTPException: failed},
    )


def _is_missing(error: Exception) -> bool:
    return isinstance(error, ConfigError | StoreRefusedError)
