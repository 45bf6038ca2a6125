"""Writes README's blocks of output from kept runs of the examples: `make docs`, by way of make_reference.py.

`python docs/make_readme.py` trains examples/calc (two minutes), and keeps what that and `agl show` print.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

sys.path.append(str(Path(__file__).parents[1] / "tests" / "benchmarks"))
from tables import replaced, table

ROOT = Path(__file__).parents[1]
PRINTED = ROOT / "examples" / "calc" / "output.txt"
SHOW = "agl show s4-g1-m0"
EXAMPLES = {
    "math": "[math](examples/math) | AutoGen, with a calculator",
    "sql": "[sql](examples/sql) | LangGraph: writer and rewriter learn, the checker does not",
    "rag": "[rag](examples/rag) | OpenAI Agents SDK, with a search",
    "coding": "[coding](examples/coding) | a program in a sandbox: it repairs bugs, hidden tests are the reward",
    "smollm/calculator": "[smollm](examples/smollm) | SmolLM2-135M with a calculator, on the plain `openai` client",
    "smollm": " | the same model alone, without a calculator",
}


def readme(page: str) -> str:
    """README with its blocks of output written anew."""
    trained, _, shown = PRINTED.read_text().partition(f"$ {SHOW}\n")
    lines, turns = trained.splitlines(), shown.split("\n\n")
    first = next(line for line in lines if line.startswith("step   1/"))
    rewards = [line for line in lines if line.startswith(("┃", "│", "verdict: "))]
    terminal = shown[shown.index("  terminal reward: ") :].rstrip()
    blocks = {
        "quickstart": _fenced(first, "…", *rewards),
        "examples": table("example | agent | greedy | sampled | seeds", map(_row, EXAMPLES)),
        "show": _fenced(f"$ {SHOW}", "…", turns[2], "…", terminal),
    }
    for name, block in blocks.items():
        page = replaced(page, f"docs/make_readme.py, {name}", block)
    return page


def _fenced(*lines: str) -> str:
    return "\n".join(["```", *lines, "```"])


def _row(example: str) -> str:
    """The example with the mean rewards of its seeds on the first held-out set."""
    runs = json.loads((ROOT / "examples" / example / "results.json").read_text()).values()
    rewards = [next(iter(run["rewards"].values())) for run in runs]
    means = (
        " → ".join(f"{mean(reward[when][mode] for reward in rewards):.2f}" for when in ("before", "after"))
        if rewards[0]["after"][mode] is not None
        else "–"
        for mode in ("greedy", "sampled")
    )
    return " | ".join([EXAMPLES[example], *means, str(len(runs))])


def main() -> None:
    agl, train = Path(sys.executable).with_name("agl"), ROOT / "examples" / "calc" / "train.toml"
    with tempfile.TemporaryDirectory() as folder:
        trained, shown = (
            subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
            for command in ([agl, "train", train], [agl, *SHOW.split()[1:]])
        )
    lasting = re.sub(r"(?m)^view: .*\n", "", trained)
    PRINTED.write_text(f"{lasting}$ {SHOW}\n{shown}")


if __name__ == "__main__":
    main()
