"""Serve an index over HTTP, so that many agents share one:

python examples/rag/serve_index.py --index INDEX --host 0.0.0.0 --port 8700
RAG_RETRIEVER=http://HOST:8700 agl train …

`POST /search {"query": …, "k": …}` answers `{"passages": [{"title": …, "text": …}, …]}`; `GET /health` the number of
passages. It needs `agl-server`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import uvicorn
from pydantic import BaseModel, Field, ValidationError
from retrieval import CORPUS, Local, open_retriever
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agl_server.http.listening import bind

LONGEST_QUERY = 1000


class Search(BaseModel):
    query: str = Field(max_length=LONGEST_QUERY)
    k: int = Field(2, ge=1, le=100)


def service(retriever: Local) -> Starlette:

    async def search(request: Request) -> JSONResponse:
        try:
            asked = Search.model_validate_json(await request.body())
        except ValidationError as error:
            return JSONResponse({"error": str(error)}, status_code=422)
        found = await run_in_threadpool(retriever.find, asked.query, asked.k)
        return JSONResponse({"passages": [asdict(each) for each in found]})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"passages": len(retriever.index)})

    return Starlette(routes=[Route("/search", search, methods=["POST"]), Route("/health", health)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve an index over HTTP.")
    parser.add_argument("--index", default=str(CORPUS), help='an index folder, a file of passages, or "random"')
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8700, help="0: any that is free")
    options = parser.parse_args()
    retriever = open_retriever(options.index)
    if not isinstance(retriever, Local):
        parser.error("--index must be a folder or a file, not another service")
    listening = bind(options.host, options.port)
    host, port = listening.getsockname()[:2]
    print(f"{len(retriever.index)} passages at http://{host}:{port}", flush=True)
    uvicorn.Server(uvicorn.Config(service(retriever), log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main()
