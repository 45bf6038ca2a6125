"""Index folders, and the service that shares one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from retrieval import CORPUS, Index, Local, Remote, open_retriever, read_passages
from serve_index import LONGEST_QUERY, service

EXAMPLE = Path(__file__).parents[1]
BRAZIL = "A country whose capital is Brasilia."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index folder of the shipped corpus, made by the script."""
    out = tmp_path_factory.mktemp("rag") / "index"
    command = [sys.executable, str(EXAMPLE / "build_index.py"), str(CORPUS), "--out", str(out)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert re.match(r"\d{4} passages in ", said)
    return out


@pytest.fixture(scope="module")
def in_memory() -> Index:
    return Index.build(list(read_passages(CORPUS)))


@pytest.fixture
def transport(in_memory: Index) -> httpx2.ASGITransport:
    return httpx2.ASGITransport(service(Local(in_memory)))


async def test_a_folder_and_the_service_find_what_the_index_in_memory_finds(
    folder: Path, in_memory: Index, transport: httpx2.ASGITransport
) -> None:
    remote = Remote("http://service", transport)
    for query in ("capital of Brazil", "country of Porto Alegre", "nothing-of-the-kind", ""):
        expected = in_memory.best(query, 3)
        assert await open_retriever(str(folder)).search(query, 3) == expected
        assert await remote.search(query, 3) == expected
    assert BRAZIL in in_memory.best("capital of Brazil", 1)[0].text


@pytest.mark.parametrize("body", ["", "{}", '{"query": "x", "k": 0}', '{"query": "' + "x" * (LONGEST_QUERY + 1) + '"}'])
async def test_the_service_refuses_what_is_no_search(transport: httpx2.ASGITransport, body: str) -> None:
    async with httpx2.AsyncClient(transport=transport, base_url="http://service") as http:
        assert (await http.post("/search", content=body)).status_code == 422
        assert (await http.get("/health")).json()["passages"] > 3000


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """Where the script serves the index."""
    command = [sys.executable, str(EXAMPLE / "serve_index.py"), "--index", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        yield served.stdout.readline().split()[-1]
        served.terminate()


async def test_the_script_serves_an_index(address: str) -> None:
    [found] = await open_retriever(address).search("capital of Brazil", 1)
    assert BRAZIL in found.text
