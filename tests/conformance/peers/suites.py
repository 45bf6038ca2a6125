"""The suites of others that agl's gateway is tested with: where they come from, how they run, and what is expected.

None of their files is in this repository. `pip` fetches a suite from the source distribution of its release.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
EXPECTED = HERE / "expected"
POLICY = HERE.parents[2] / "examples" / "calc" / "policy"
PASSES = "passes"
VARIES = "passes or not by what is sampled, and what is in the cache"
"""The reason of tests that are not compared."""
SECONDS = 120
"""For one test or example."""


@dataclass(frozen=True)
class Suite:
    """Tests or examples of another project."""

    distribution: str
    about: str
    """Which of its tests are run, and against what."""
    files: tuple[str, ...]
    """What pytest gets, or, of examples, the folders with the scripts."""
    server: str = "obedient"
    """The server that answers it: the gateway before a scripted model, or `agl policy serve` with the torch engine."""
    examples: bool = False
    """It is scripts that have to end well, and no tests."""
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def expected(self) -> Expected:
        return Expected.read(EXPECTED / f"{self.distribution}.txt")

    def fetched(self, release: str) -> Path:
        """The unpacked source distribution of a release, which is kept in this environment."""
        # LangChain's read the README of the repository that they are at home in.
        folder = Path(sys.prefix) / "suites" / "libs" / "partners" / f"{self.distribution}-{release}"
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            (folder.parents[2] / "README.md").write_text("A page about LangChain. " * 100)
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder.parent]
            # vLLM's would otherwise want a compiler, and torch once more, to say what it depends on.
            vllm = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": release}
            isolation = ["--no-build-isolation"] if self.distribution == "vllm" else []
            wanted = [*isolation, "--no-binary", self.distribution, f"{self.distribution}=={release}"]
            subprocess.run([*pip, *wanted], check=True, env={**os.environ, **vllm})
            (archive,) = folder.parent.glob(f"{self.distribution.replace('-', '_')}-{release}.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(folder.parent / "unpacking", filter="data")
            next((folder.parent / "unpacking").glob(f"*-{release}")).rename(folder)
        return folder

    def run(self, release: str, base_url: str, key: str) -> dict[str, str]:
        """How each test ended: `passed`, `skipped: why` or `failed: why`."""
        folder = self.fetched(release)
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
            "TEST_API_BASE_URL": base_url if self.distribution == "openai" else base_url.removesuffix("/v1"),
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.environment,
        }
        return (self._run_examples if self.examples else self._run_tests)(folder, environment)

    def _run_tests(self, folder: Path, environment: dict[str, str]) -> dict[str, str]:
        outcomes = folder / "outcomes.json"
        outcomes.unlink(missing_ok=True)
        environment |= {"PYTHONPATH": str(HERE / "inside"), "AGL_OUTCOMES": str(outcomes)}
        plugins = [f"-p{name}" for name in ("agl_outcomes", "no:cacheprovider", "no:pytest-retry")]
        # A client that tests share is bound to one loop.
        loops = [f"-oasyncio_default_{kind}_loop_scope=session" for kind in ("fixture", "test")]
        limits = ["-oaddopts=", *loops, "--no-header", "--tb=short", f"--timeout={SECONDS}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *plugins, *limits, *self.options, *self.files],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert outcomes.exists(), done.stdout[-5000:] + done.stderr[-2000:]
        (folder / "output.txt").write_text(done.stdout)
        return dict(json.loads(outcomes.read_text()))

    def _run_examples(self, folder: Path, environment: dict[str, str]) -> dict[str, str]:
        scripts = sorted(
            script
            for part in self.files
            for script in (folder / part).rglob("*.py")
            if "__main__" in script.read_text() and script.name != "__init__.py"
        )

        def run(script: Path) -> str:
            name = str(script.relative_to(folder).with_suffix(""))
            command = [sys.executable, "-m", name.replace("/", ".")]
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                )
            except subprocess.TimeoutExpired:
                return "failed: timeout"
            return "passed" if done.returncode == 0 else f"failed: {done.stderr.strip().splitlines()[-1][:600]}"

        with ThreadPoolExecutor(2) as pool:
            return dict(zip((str(s.relative_to(folder)) for s in scripts), pool.map(run, scripts), strict=True))


@dataclass(frozen=True)
class Expected:
    """What a file of `expected/` says: the release, and each test that does not pass under its reason.

    The first line names the release. A line `## reason` is above the tests that it holds for, `## passes` above those
    that pass.
    """

    release: str
    groups: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, path: Path) -> Expected:
        head, *sections = path.read_text().split("\n## ")
        groups = {}
        for section in sections:
            reason, *tests = section.strip().splitlines()
            groups[reason] = tuple(tests)
        return cls(head.strip().removeprefix("# ").partition("==")[2], groups)

    def write(self, path: Path, distribution: str) -> None:
        sections = (f"## {reason}\n" + "\n".join(tests) for reason, tests in self.groups.items())
        path.write_text("\n\n".join((f"# {distribution}=={self.release}", *sections)) + "\n")

    def differences(self, outcomes: Mapping[str, str]) -> Iterator[str]:
        """What newly passes, newly fails, is new or is gone."""
        known = {test for tests in self.groups.values() for test in tests}
        passing, varying = (self.groups.get(name, ()) for name in (PASSES, VARIES))
        for test, outcome in outcomes.items():
            if test not in known or (test not in varying and (outcome == "passed") != (test in passing)):
                yield f"{test} {'is new: ' if test not in known else ''}{outcome}"
        yield from (f"{test} is gone" for test in known - outcomes.keys())

    def updated(self, outcomes: Mapping[str, str]) -> Expected:
        """The same with these outcomes; a test that newly fails stands under its own error, for a person to sort."""
        reasons = {test: reason for reason, tests in self.groups.items() for test in tests if reason != PASSES}
        groups: dict[str, list[str]] = {PASSES: []}
        for test in sorted(outcomes):
            outcome = outcomes[test]
            known = reasons.get(test, " ".join(outcome.split()))
            reason = PASSES if outcome == "passed" and known != VARIES else known
            groups.setdefault(reason, []).append(test)
        return Expected(self.release, {reason: tuple(tests) for reason, tests in groups.items()})


SUITES = (
    Suite(
        "langchain-openai",
        "langchain-tests' integration suite for `ChatOpenAI`, with chat completions and Responses.",
        # It has those of chat completions too.
        ("tests/integration_tests/chat_models/test_responses_standard.py",),
        options=("--disable-recording",),
    ),
    Suite(
        "langchain-anthropic",
        "langchain-tests' integration suite for `ChatAnthropic`.",
        ("tests/integration_tests/test_standard.py",),
        options=("--disable-recording",),
    ),
    Suite(
        "openai",
        "The client's own tests of creating completions, chat completions and responses, and of listing models.",
        (
            "tests/api_resources/chat/test_completions.py",
            "tests/api_resources/test_completions.py",
            "tests/api_resources/test_responses.py",
            "tests/api_resources/test_models.py",
        ),
        options=("-k", "create or compact or (models and (retrieve or list))"),
    ),
    Suite(
        "anthropic",
        "The client's own tests of creating messages, counting tokens, and listing models.",
        ("tests/api_resources/test_messages.py", "tests/api_resources/test_models.py"),
    ),
    Suite(
        "openai-agents",
        "The SDK's examples of patterns, basics, handoffs and customer service, each as a script of its own. "
        "Left out are the other folders, most of which need hosted tools, voice or other services.",
        ("examples/agent_patterns", "examples/basic", "examples/handoffs", "examples/customer_service"),
        examples=True,
        environment={"OPENAI_AGENTS_DISABLE_TRACING": "1", "EXAMPLES_INTERACTIVE_MODE": "auto"},
    ),
    Suite(
        "vllm",
        "vLLM's tests of its OpenAI and Anthropic APIs, as far as they ask a server about text.",
        tuple(
            f"tests/entrypoints/{name}.py"
            for name in (
                "anthropic/test_messages",
                "openai/chat_completion/test_chat",
                "openai/chat_completion/test_chat_completion",
                "openai/chat_completion/test_chat_echo",
                "openai/chat_completion/test_chat_logit_bias_validation",
                "openai/chat_completion/test_completion_with_function_calling",
                "openai/chat_completion/test_enable_force_include_usage",
                "openai/chat_completion/test_include_reasoning",
                "openai/completion/test_completion",
                "openai/responses/test_basic",
                "openai/responses/test_errors",
                "openai/responses/test_function_call",
                "openai/responses/test_simple",
                "openai/responses/test_stateful",
                "openai/responses/test_structured_output",
                "openai/test_return_token_ids",
                "openai/test_return_tokens_as_ids",
            )
        ),
        server="policy",
        options=("-p", "agl_vllm", "--confcutdir=tests/entrypoints"),
        environment={"AGL_POLICY": str(POLICY)},
    ),
)
