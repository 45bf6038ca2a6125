"""The agent's search: a BM25 index of passages, here or behind HTTP. It knows nothing of agl.

An index is made of a JSONL file of passages, one `{"title": …, "text": …}` a line, gzipped or not: the shipped corpus,
or a dump of Wikipedia cut into passages.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import bm25s
import httpx2
import numpy as np

CORPUS = Path(__file__).parent / "data" / "corpus.jsonl.gz"
TITLE_COUNTS = 2
"""How often a title's words count beside those of its text."""


@dataclass(frozen=True)
class Passage:
    """A result of a search."""

    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.title}: {self.text}"


class Retriever(Protocol):
    """Anything that can be searched."""

    async def search(self, query: str, k: int) -> list[Passage]:
        """The k best passages, best first; fewer if the corpus is smaller."""
        ...


class Index:
    """A BM25 index and its passages.

    >>> index = Index.build([Passage("Lek", "A currency."), Passage("Rome", "A city."), Passage("Oslo", "A city.")])
    >>> index.best("what is Lek", 1)
    [Passage(title='Lek', text='A currency.')]
    """

    def __init__(self, bm25: bm25s.BM25, corpus: Sequence[dict[str, Any]]) -> None:
        self._bm25, self._corpus = bm25, corpus

    @classmethod
    def build(cls, passages: Sequence[Passage]) -> Index:
        bm25 = bm25s.BM25()
        bm25.index(_words([f"{f'{each.title} ' * TITLE_COUNTS}{each.text}" for each in passages]), show_progress=False)
        return cls(bm25, [asdict(each) for each in passages])

    @classmethod
    def load(cls, folder: Path) -> Index:
        """Open an index that was saved; its files stay on disk, so that a large one needs little memory."""
        bm25 = bm25s.BM25.load(folder, mmap=True, load_corpus=True)
        corpus, bm25.corpus = bm25.corpus, None  # else it would return passages instead of their places
        return cls(bm25, corpus)

    def save(self, folder: Path) -> None:
        self._bm25.save(folder, corpus=self._corpus, show_progress=False)

    def __len__(self) -> int:
        return len(self._corpus)

    def best(self, query: str, k: int) -> list[Passage]:
        """The k best passages, best first; of equals the earlier one, on every machine (bm25s leaves that open)."""
        words = bm25s.tokenize([query], stopwords="en", return_ids=False, show_progress=False)[0]
        scores = self._bm25.get_scores(words) if words else np.zeros(len(self))
        k = min(k, len(self))
        good = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
        return [self._passage(int(at)) for at in good[np.argsort(-scores[good], kind="stable")][:k]]

    def any(self, query: str, k: int) -> list[Passage]:
        """k passages that have nothing to do with the query; the same for the same query."""
        rng = random.Random(query)
        return [self._passage(rng.randrange(len(self))) for _ in range(k)]

    def _passage(self, at: int) -> Passage:
        found = self._corpus[at]
        return Passage(found["title"], found["text"])


@dataclass(frozen=True)
class Local:
    """An index in this process."""

    index: Index
    broken: bool = False
    """Find random passages: the control of the experiment."""

    def find(self, query: str, k: int) -> list[Passage]:
        return self.index.any(query, k) if self.broken else self.index.best(query, k)

    async def search(self, query: str, k: int) -> list[Passage]:
        return self.find(query, k)


class Remote:
    """A service that `serve_index.py` started; many agents share it."""

    def __init__(self, url: str, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._http = httpx2.AsyncClient(base_url=url, transport=transport, timeout=30)

    async def search(self, query: str, k: int) -> list[Passage]:
        answer = await self._http.post("/search", json={"query": query, "k": k})
        answer.raise_for_status()
        return [Passage(**each) for each in answer.json()["passages"]]


def open_retriever(where: str) -> Retriever:
    """The retriever that a text names: a service's URL, an index folder, a file of passages, or "random".

    "random" finds random passages of the shipped corpus.
    """
    if where.startswith(("http://", "https://")):
        return Remote(where)
    if where == "random":
        return Local(Index.build(list(read_passages(CORPUS))), broken=True)
    path = Path(where)
    return Local(Index.load(path) if path.is_dir() else Index.build(list(read_passages(path))))


def read_passages(file: Path) -> Iterator[Passage]:
    """The passages of a JSONL file, one after another."""
    for number, line in enumerate(read_lines(file), start=1):
        try:
            found = json.loads(line)
            yield Passage(str(found["title"]), str(found["text"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{file}, line {number}: a passage is {{"title": …, "text": …}}, this is {line[:80]!r}'
            ) from error


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a file, gzipped or not, without empty ones."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        yield from (line for line in lines if line.strip())


def _words(texts: list[str]) -> Any:
    return bm25s.tokenize(texts, stopwords="en", show_progress=False)
