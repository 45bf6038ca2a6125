"""Make an index folder of a file of passages, for instance a dump of Wikipedia:

python examples/rag/build_index.py PASSAGES.jsonl.gz --out INDEX

Each line is one passage, `{"title": …, "text": …}`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from retrieval import Index, read_passages


def main() -> None:
    parser = argparse.ArgumentParser(description="Make an index folder of a file of passages.")
    parser.add_argument("passages", type=Path, help="a JSONL file, gzipped or not")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    options = parser.parse_args()
    index = Index.build(list(read_passages(options.passages)))
    index.save(options.out)
    print(f"{len(index)} passages in {options.out}")


if __name__ == "__main__":
    main()
