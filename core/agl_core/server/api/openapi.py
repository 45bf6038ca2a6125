"""The OpenAPI document of a Lightning Server, made of the descriptions that its routes are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from agl_core.wire.body import ErrorReply
from agl_core.wire.operation import REFUSALS, AnyOperation, Operation, Right
from agl_core.wire.workers import OF_WORKERS

_REFERENCE = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"\{(\w+)\}")
_SCHEMES: Mapping[str, list[dict[str, list[str]]]] = {
    Right.WORKER: [{"worker": []}],
    Right.OPERATOR: [{"operator": []}],
    Right.EITHER: [{"worker": []}, {"operator": []}],
    Right.LEASE: [{"lease": []}],
}


def document(
    agents: Iterable[str],
    prefix: str,
    version: str,
    further: Sequence[AnyOperation] = (),
    rights: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """OpenAPI 3.1 of all operations, and of the model APIs at the paths `agents`, plain and below `prefix`.

    `further` operations and their `rights` are those of a source of rollouts.
    """
    operations = [*OF_WORKERS, *further]
    models: list[type[BaseModel]] = [ErrorReply]
    for each in operations:
        models += [each.body, each.reply] if each.has_body else [each.reply]
    references, schemas = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)], ref_template=_REFERENCE
    )
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _described(each, references)
    for path in (f"{start}{path}" for path in agents for start in (prefix, "")):
        paths[path] = {"get" if path.endswith("/models") else "post": _of_agents(path)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "agl Lightning Server",
            "version": version,
            "description": "Workers run rollouts, operators see what these wait for, and agents make model calls. "
            "Each has a key of its own.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer", "description": text}
                for name, text in {
                    "worker": "AGL_WORKER_KEY.",
                    "operator": "AGL_OPERATOR_KEY.",
                    "lease": "The secret of an attempt's lease.",
                    "agent": "The key of an attempt, as its lease brings it.",
                    **rights,
                }.items()
            },
        },
    }


def _described(operation: Operation[Any, Any], references: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    refusals = {**REFUSALS, **operation.refusals}
    if not operation.has_body:
        refusals = {status: text for status, text in refusals.items() if status not in (413, 422)}
    described = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [str(operation.right)],
        "security": _SCHEMES.get(operation.right, [{operation.right: []}]),
        "parameters": _parameters(operation.path),
        "responses": {
            "200": {"description": "Done.", "content": _json(references[operation.reply, "validation"])},
            **{
                str(status): {"description": text, "content": _json(references[ErrorReply, "validation"])}
                for status, text in sorted(refusals.items())
            },
        },
    }
    if operation.has_body:
        content = _json(references[operation.body, "validation"])
        described["requestBody"] = {"required": True, "content": content}
    return described


def _of_agents(path: str) -> dict[str, Any]:
    """A route of agents. What it takes and gives is what the API that it is compatible with documents."""
    described: dict[str, Any] = {
        "summary": f"The API of that name, for the agent of an attempt: {path.rpartition('/v1/')[2]}",
        "tags": ["agent"],
        "security": [{"agent": []}],
        "parameters": _parameters(path),
        "responses": {
            "200": {"description": "As in that API."},
            "4XX": {"description": "An error in the shape of that API."},
            "502": {"description": "The model server failed."},
            "503": {"description": "No engine serves a model now; Retry-After says when to try again."},
            "504": {"description": "The model server did not answer in time."},
        },
    }
    if not path.endswith("/models"):
        described["requestBody"] = {"required": True, "content": _json({"type": "object"})}
    return described


def _parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(path)
    ]


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": dict(schema)}}
