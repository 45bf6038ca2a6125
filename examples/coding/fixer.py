"""A coding agent of one module: it shows the file in its folder to a model, and edits and tests as the model asks.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python3 fixer.py "python3 check.py" "A test of cart.py fails. Repair cart.py."

It knows nothing of agl, and needs the standard library alone.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

SYSTEM = "Repair the module: test it, edit it, and stop when the tests pass."
MAX_CALLS = 12


def tool(name, description, **parameters):
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in parameters.items()}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("edit", "Replace a word, number or operator in a line, once.", line="string", old="string", new="string"),
    tool("test", "Run the tests. The first one that fails is shown, with the lines that it ran."),
]


def edited(text, line, old, new):
    """The text after an edit, and the tool's answer. `<` is no part of `<=` there, nor `1` of `10`."""
    lines, kind = text.splitlines(), r"\w" if re.match(r"\w", old) else r"[^\w\s()\[\]]"
    if old and 0 < line <= len(lines):
        pattern = f"(?<!{kind}){re.escape(old)}(?!{kind})"
        lines[line - 1], count = re.subn(pattern, lambda _: new, lines[line - 1], count=1)
        if count:
            return "\n".join(lines) + "\n", f"L{line} {lines[line - 1].strip()}"
    return text, f"error: L{line} has no {old}"


def use(module, test, name, arguments):
    if name == "test":
        done = subprocess.run(test, shell=True, capture_output=True, text=True, timeout=20)
        said = done.stdout.strip()[-300:] or done.stderr.strip().rpartition("\n")[2]
        return f"error: {said}" if done.returncode else said
    line, old, new = (str(arguments[key]) for key in ("line", "old", "new"))
    text, answer = edited(module.read_text(), int(line.lstrip("L")), old, new)
    module.write_text(text)
    return answer


def ask(messages):
    body = {"model": os.environ.get("OPENAI_MODEL", "default"), "messages": messages, "tools": TOOLS}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)["choices"][0]["message"]


def main(test, prompt):
    module = next(path for path in sorted(Path().glob("*.py")) if path.name != "check.py")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    for _ in range(MAX_CALLS):
        reply = ask(messages)
        if not reply.get("tool_calls"):
            return reply.get("content")
        messages.append(reply)
        for call in reply["tool_calls"]:
            try:
                result = use(module, test, call["function"]["name"], json.loads(call["function"]["arguments"]))
            except (KeyError, ValueError, TypeError) as error:
                result = f"error: {error!r}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return "I am out of calls."


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
