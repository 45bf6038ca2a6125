"""Check and measure the engines on one CUDA GPU, in ten minutes, with what is installed; see docs/gpu.md.

    python -m tests.gpu                # writes the figures into docs/gpu.md, each part's when it ends
    python -m tests.gpu --part speed   # one part; the figures of the others stay
    python -m tests.gpu --device cpu   # plays the parts small, on the CPU, and writes nothing

A part that needs something that is not installed is left out, and says so. The exit status is 1 if a part failed, or
found the GPU and the CPU further apart than rounding explains. This module imports nothing that is not Python's own, so
that whatever is missing can be named.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- written by `make gpu` -->", "<!-- to here -->"
ENGINE = (
    "torch", "transformers", "tokenizers", "peft", "safetensors", "jinja2", "httpx", "numpy", "orjson", "pluggy",
    "pydantic", "rich", "starlette", "tomli_w", "uvicorn",
)  # fmt: skip
VERL = (*ENGINE, "verl", "ray", "tensordict", "transfer_queue", "hydra")
NAMES = {"verl": "veRL", "ray": "Ray", "vllm": "vLLM", "transfer_queue": "TransferQueue", "hydra": "hydra-core"}
"""Distributions that are not called as their module is."""


@dataclass(frozen=True)
class Part:
    """One table of the page."""

    title: str
    needs: Sequence[str]
    """Modules that have to be installed."""


PARTS: Mapping[str, Part] = {
    "agreement": Part("The torch engine on the GPU and on the CPU", ENGINE),
    "speed": Part("Tokens per second and memory", ENGINE),
    "verl_parity": Part("veRL's update and the torch engine's", VERL),
    "verl_steps": Part(
        "Three steps of the veRL engine, with a LoRA adapter, offloading and a restart", (*VERL, "vllm")
    ),
}
"""By the function in `measures` that plays it: `(setup, seconds)` returns a Table in time, or raises TimeoutError."""


def missing(needs: Sequence[str]) -> list[str]:
    """The modules that are not installed, by the names of their distributions."""
    return [NAMES.get(name, name) for name in needs if importlib.util.find_spec(name) is None]


def missing_gpu() -> str | None:
    """Why nothing can be measured on a GPU here; None if it can."""
    if missing(["torch"]):
        return "no CUDA GPU can be used: torch is not installed"
    import torch

    return None if torch.cuda.is_available() else f"no CUDA GPU: torch {torch.__version__} finds none"


def play(name: str, device: str, folder: Path, deadline: float) -> tuple[str, str]:
    """Play a part: its outcome, "measured", "not run" or "failed", and its text in Markdown. It stops no other part."""
    remaining = deadline - time.monotonic()
    if absent := missing(PARTS[name].needs):
        return "not run", f"Not run: not installed: {', '.join(absent)}."
    if remaining <= 0:
        return "not run", "Not run: the time was over."
    folder.mkdir()
    began = time.monotonic()
    try:
        measures = importlib.import_module(".measures", __package__)
        table = getattr(measures, name)(measures.Setup(device, folder), remaining)
    except TimeoutError:
        traceback.print_exc()
        return "failed", f"Not run to its end: the time was over after {remaining:.0f} s."
    except Exception as error:
        traceback.print_exc()
        return "failed", f"**It failed: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}**"
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    paragraphs = ["\n".join(f"| {' | '.join(line)} |" for line in lines), *(f"**{text}**" for text in table.beyond)]
    outcome = "failed" if table.beyond else "measured"
    return outcome, "\n\n".join([*paragraphs, f"It took {time.monotonic() - began:.0f} s."])


def written(page: str, name: str, machine: str, text: str) -> str:
    """The page with this text in place of what it had of that part; the other parts stay."""
    before, rest = page.split(BEGIN)
    figures, after = rest.split(END)
    sections = {section.partition("\n")[0]: section.strip() for section in figures.split("### ")[1:]}
    title = PARTS[name].title
    sections[title] = f"{title}\n\nMeasured on: {machine}.\n\n{text}"
    ordered = "\n\n".join(f"### {sections[part.title]}" for part in PARTS.values() if part.title in sections)
    return f"{before}{BEGIN}\n\n{ordered}\n\n{END}{after}"


def machine(device: str) -> str:
    """What it is measured on: the device, its driver, the versions, the date."""
    import torch

    versions = f"torch {torch.__version__}, Python {platform.python_version()}; {time.strftime('%d %B %Y')}"
    if device == "cpu":
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), {versions}"
    properties = torch.cuda.get_device_properties(0)
    driver = Path("/proc/driver/nvidia/version")
    words = driver.read_text().split() if driver.exists() else []
    number = next((word for word in words if word[0].isdigit() and "." in word), "unknown")
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{properties.name} ({memory}), driver {number}, CUDA {torch.version.cuda}, {versions}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="no part goes on after that many")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and (reason := missing_gpu()):
        sys.exit(f"Nothing was run: {reason}. `python -m tests.gpu --device cpu` plays some parts on the CPU.")
    deadline, outcomes = time.monotonic() + 60 * options.minutes, []
    with tempfile.TemporaryDirectory(prefix="agl-gpu-") as folder:
        for name in options.part or PARTS:
            print(f"{PARTS[name].title} …", flush=True)
            outcome, text = play(name, options.device, Path(folder) / name, deadline)
            print(f"### {PARTS[name].title}\n\n{text}\n", flush=True)
            outcomes.append(outcome)
            if on_gpu and outcome != "not run":  # Written at once: what comes after it may be killed.
                page = PAGE.read_text(encoding="utf-8")
                PAGE.write_text(written(page, name, machine("cuda"), text), encoding="utf-8")
    if on_gpu:
        print(f"The figures are in {PAGE}.")
    elif "measured" in outcomes:
        print(f"Played on: {machine('cpu')}. This is a stand-in: docs/gpu.md has figures of GPUs only.")
    return int("failed" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
