"""The parts of the kit: what each of them needs, in which order they are played, and what is said of each.

Imports nothing that is not Python's own, so that whatever is missing can be named.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = ("torch", "transformers", "tokenizers", "peft", "safetensors", "jinja2")
ENGINE = (*LIBRARIES, "httpx", "numpy", "orjson", "pluggy", "pydantic", "rich", "starlette", "tomli_w", "uvicorn")
VERL = (*ENGINE, "verl", "ray", "tensordict", "transfer_queue", "hydra")
NAMES = {"verl": "veRL", "ray": "Ray", "vllm": "vLLM", "transfer_queue": "TransferQueue", "hydra": "hydra-core"}
"""What a module is called where it is not called by its own name."""


@dataclass(frozen=True)
class Setup:
    """What a part is played on."""

    device: str
    """"cuda", or "cpu" as its stand-in, with sizes that take seconds."""
    folder: Path
    """For models and the engines' runs; it is removed afterwards."""

    @property
    def stand_in(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Table:
    """What a part measured."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    beyond: Sequence[str] = ()
    """What is not as it has to be, one sentence each."""

    @property
    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@dataclass(frozen=True)
class Part:
    """One table of the page."""

    title: str
    module: str
    """In this folder; its `measure(setup, seconds)` makes the table in that time, or raises TimeoutError."""
    needs: Sequence[str]
    """Modules that have to be installed."""


@dataclass(frozen=True)
class Played:
    """What became of a part."""

    part: Part
    table: Table | None
    remark: str
    """Why there is no table, or how long it took."""
    failed: bool = False

    @property
    def body(self) -> str:
        made = [] if self.table is None else [self.table.markdown, *(f"**{each}**\n" for each in self.table.beyond)]
        return "\n".join([*made, f"{self.remark}\n"])

    @property
    def markdown(self) -> str:
        return f"### {self.part.title}\n\n{self.body}"


PARTS = (
    Part("The torch engine on the GPU and on the CPU", "agreement", ENGINE),
    Part("Tokens per second and memory", "speed", ENGINE),
    Part("veRL's update and the torch engine's", "verl_parity", VERL),
    Part("Three steps of the veRL engine, with a LoRA adapter, offloading and a restart", "verl_steps",
         (*VERL, "vllm")),
)  # fmt: skip


def missing_gpu() -> str | None:
    """Why nothing can be measured on a GPU here; None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "no CUDA GPU can be used: torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"no CUDA GPU: torch {torch.__version__} finds none"
    return None


def missing(needs: Sequence[str]) -> str | None:
    """Which of the modules are not installed; None if all are.

    >>> missing(["json", "verl_of_nowhere", "ray_of_nowhere"])
    'verl_of_nowhere and ray_of_nowhere are not installed'
    """
    absent = [NAMES.get(name, name) for name in needs if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    *before, last = absent
    return f"{', '.join(before)} and {last} are not installed" if before else f"{last} is not installed"


def play(
    parts: Sequence[Part],
    device: str,
    seconds: float,
    say: Callable[[str], None],
    keep: Callable[[Played], None] | None = None,
) -> list[Played]:
    """Every part whose needs are met and that begins before the time is over. A part that fails stops no other.

    `keep` gets each when it ends: what comes after it may be killed.
    """
    deadline = time.monotonic() + seconds
    found = []
    with tempfile.TemporaryDirectory(prefix="agl-gpu-") as temporary:
        for part in parts:
            say(f"{part.title} …")
            found.append(_play(part, Setup(device, Path(temporary) / part.module), deadline))
            say(found[-1].markdown)
            if keep is not None:
                keep(found[-1])
    return found


def _play(part: Part, setup: Setup, deadline: float) -> Played:
    reason = missing(part.needs)
    left = deadline - time.monotonic()
    if reason is None and left <= 0:
        reason = "the time was over"
    if reason is not None:
        return Played(part, None, f"Not run: {reason}.")
    setup.folder.mkdir()
    began = time.monotonic()
    try:
        table: Table = importlib.import_module(f".{part.module}", __package__).measure(setup, left)
    except TimeoutError:
        traceback.print_exc()
        return Played(part, None, f"Not run to its end: the time was over after {left:.0f} s.", failed=True)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        return Played(part, None, f"**It failed: {type(error).__name__}: {lines[0]}**", failed=True)
    return Played(part, table, f"It took {time.monotonic() - began:.0f} s.", failed=bool(table.beyond))


def machine(device: str) -> str:
    """What it was measured on: the device, its driver, the versions, the date."""
    import torch

    versions = f"torch {torch.__version__}, Python {platform.python_version()}; {time.strftime('%d %B %Y')}"
    if device == "cpu":
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), {versions}"
    properties = torch.cuda.get_device_properties(0)
    driver = Path("/proc/driver/nvidia/version")
    words = driver.read_text().split() if driver.exists() else []
    number = next((word for word in words if word[0].isdigit() and "." in word), "unknown")
    return (
        f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB), driver {number}, CUDA {torch.version.cuda}, "
        f"{versions}"
    )
