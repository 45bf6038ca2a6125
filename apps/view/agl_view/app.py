"""The application: its routes, its errors, and the guard in front."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from agl_core.errors import AglError, ConfigError, StoreRefusedError
from agl_view.folders import RunFolders
from agl_view.pages.base import BadQueryError, Pages
from agl_view.pages.compare import compare_page, task_page
from agl_view.pages.health import health_page
from agl_view.pages.run import run_page
from agl_view.security import Guard


def make_app(paths: Sequence[Path], token: str, operator_key: str | None = None) -> Starlette:
    """The pages about the runs at `paths`, each a run or a folder of runs, for browsers that have shown `token`.

    Browsers on other machines need the operator's key; without one they see nothing.
    """
    pages = Pages(RunFolders(paths))

    def page_of(handler: Callable[[Pages, Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def page(request: Request) -> Response:
            return await handler(pages, request)

        return page

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
            Route("/compare", page_of(compare_page)),
            Route("/compare/task", page_of(task_page)),
            Route(run_path, page_of(run_page)),
            Route(f"{run_path}/changed", pages.changed),
            Route(f"{run_path}/health", page_of(health_page)),
            Route(f"{run_path}/rollouts", pages.rollouts),
            Route(f"{run_path}/rollouts/{{id:path}}", pages.rollout),
            Route(f"{run_path}/groups/{{id:path}}", pages.group),
            Route(f"{run_path}/call", pages.call),
            Mount("/static", StaticFiles(packages=[("agl_view", "static")])),
        ],
        middleware=[Middleware(Guard, token=token, operator_key=operator_key)],
        exception_handlers={AglError: failed, HTTPException: failed},
    )


def _is_missing(error: Exception) -> bool:
    return isinstance(error, ConfigError | StoreRefusedError)
