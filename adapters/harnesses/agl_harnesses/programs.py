"""The command-line agents that are known by name, as they run without a person. Versions stand in docs/harnesses.md."""

from __future__ import annotations

from typing import Any

from agl_core.types import Json
from agl_core.types.forms import dump_json
from agl_harnesses.harness import Program

_OPENCODE = """{
  "model": "agl/{model}", "small_model": "agl/{model}", "enabled_providers": ["agl"],
  "permission": "allow", "share": "disabled", "autoupdate": false, "lsp": false, "formatter": false,
  "mcp": {mcp},
  "provider": {"agl": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{base_url}", "apiKey": "{key}"},
    "models": {"{model}": {"tool_call": true, "limit": {"context": 128000, "output": 8192}}}
  }}
}
"""
_CODEX = """\
model = "{model}"
model_provider = "agl"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.agl]
name = "agl"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[features]
apps = false
plugins = false

[analytics]
enabled = false

[feedback]
enabled = false

{mcp}"""
_QWEN = """{
  "security": {"auth": {"selectedType": "openai"}},
  "general": {"enableAutoUpdate": false},
  "privacy": {"usageStatisticsEnabled": false},
  "telemetry": {"enabled": false},
  "mcpServers": {mcp}
}
"""


_AIDER = """{
  "openai/{model}": {
    "litellm_provider": "openai", "mode": "chat", "max_input_tokens": 128000, "max_output_tokens": 8192,
    "input_cost_per_token": 0, "output_cost_per_token": 0
  }
}
"""


def _codex_mcp(servers: Any) -> str:
    """JSON's texts and lists are TOML's too."""
    lines = list[str]()
    for name, server in servers.items():
        lines += [f"[mcp_servers.{name}]", "startup_timeout_sec = 120", "required = true"]
        lines += [f"{key} = {dump_json(server[key])}" for key in ("command", "args")]
        lines += [f"env.{dump_json(key)} = {dump_json(value)}" for key, value in server["env"].items()]
    return "\n".join(lines)


def _opencode_mcp(servers: Any) -> str:
    def own(command: str, args: list[str], env: dict[str, str]) -> Json:
        return {"type": "local", "command": [command, *args], "environment": env, "timeout": 120_000}

    return dump_json({name: own(**server) for name, server in servers.items()})


def _qwen_mcp(servers: Any) -> str:
    return dump_json({name: {**server, "discoveryTimeoutMs": 120_000} for name, server in servers.items()})


def _mini_answer(printed: Json) -> Json:
    """It prints its whole history, and last what it submitted."""
    _, ended, submitted = str(printed or "").rpartition("\nExit:\n")
    return submitted.rpartition("\nSaved trajectory to ")[0].strip() if ended else printed


def _aider_answer(printed: Json) -> Json:
    """It prints its model and repository before, and its usage behind."""
    text = str(printed or "").partition("\n\n")[2]
    return (text.rpartition("\nTokens: ")[0] or text).strip() or printed


PROGRAMS: tuple[Program, ...] = (
    Program(
        name="claude-code",
        command=(
            *("claude", "--print", "--permission-mode=bypassPermissions", "--model={model}"),
            *("--mcp-config={home}/.claude/mcp.json", "{arguments}"),
        ),
        install="npm install -g @anthropic-ai/claude-code",
        reads_prompt=True,
        variables={
            "CLAUDE_CONFIG_DIR": "{home}/.claude",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",  # Each call says what it is for.
            "DISABLE_AUTOUPDATER": "1",
            "MCP_TIMEOUT": "120000",  # Packages with tools import slowly on a busy machine.
            "IS_SANDBOX": "1",  # Otherwise root may not bypass permissions.
        },
        files={".claude/mcp.json": '{"mcpServers": {mcp}}'},
        settings=("CLAUDE", "ANTHROPIC_"),
    ),
    Program(
        name="codex",
        command=(
            *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *("{arguments}", "-"),
        ),
        install="npm install -g @openai/codex",
        reads_prompt=True,
        variables={"CODEX_HOME": "{home}/.codex"},
        files={".codex/config.toml": _CODEX},
        mcp=_codex_mcp,
        settings=("CODEX_",),
    ),
    Program(
        name="opencode",
        command=("opencode", "run", "{arguments}"),
        install="npm install -g opencode-ai",
        reads_prompt=True,
        variables={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        # It installs the package for plugins there, by npm; this it can do without.
        files={".config/opencode/opencode.json": _OPENCODE, ".config/opencode/.npmrc": "offline=true\n"},
        mcp=_opencode_mcp,
        settings=("OPENCODE",),
    ),
    Program(
        name="qwen-code",
        command=("qwen", "--yolo", "--auth-type=openai", "--model={model}", "{arguments}"),
        install="npm install -g @qwen-code/qwen-code",
        reads_prompt=True,
        variables={"OPENAI_MODEL": "{model}", "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"},
        files={".qwen/settings.json": _QWEN},
        mcp=_qwen_mcp,
        settings=("QWEN_", "GEMINI_"),
    ),
    Program(
        name="mini-swe-agent",
        command=("mini", "--model=openai/{model}", "{arguments}", "--yolo", "--exit-immediately", "--task={prompt}"),
        install="pipx install mini-swe-agent",
        variables={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "COLUMNS": "10000",  # Its lines are broken there.
        },
        answer=_mini_answer,
        settings=("MSWEA_", "LITELLM_"),
    ),
    Program(
        name="aider",
        command=(
            *("aider", "--model=openai/{model}", "--yes-always", "--no-git", "--no-check-update", "--no-analytics"),
            *("--no-show-model-warnings", "--no-show-release-notes", "--no-pretty", "--no-fancy-input"),
            *("{arguments}", "--message-file={prompt_file}"),
        ),
        install="pipx install aider-chat",
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        files={".aider.model.metadata.json": _AIDER},  # Or it asks the internet for the model's limits.
        answer=_aider_answer,
        settings=("AIDER_", "LITELLM_"),
    ),
)
