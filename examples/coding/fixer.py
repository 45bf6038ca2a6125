"""A coding agent with one tool, a shell, as mini-swe-agent has it: what the model asks for is run in this folder.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python3 fixer.py "Tests of cart.py fail. Repair it."

It knows nothing of agl, and needs the standard library alone.
"""

import json
import os
import subprocess
import sys
import urllib.request

SYSTEM = "Repair the module. python3 check.py tests it, python3 edit.py LINE NEW edits it."
DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
MAX_CALLS = 12
COMMAND = {"type": "string", "description": "The bash command to execute"}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {"type": "object", "properties": {"command": COMMAND}, "required": ["command"]},
    },
}


def ask(messages):
    body = {"model": os.environ.get("OPENAI_MODEL", "default"), "messages": messages, "tools": [BASH]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)["choices"][0]["message"]


def run(arguments):
    """The output of a command; a failed one's begins with "error:"."""
    try:
        command = json.loads(arguments)["command"]
        done = subprocess.run(command, shell=True, text=True, stdout=-1, stderr=subprocess.STDOUT, timeout=20)
    except (KeyError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
        return f"error: {error!r}"
    return f"error: {done.stdout}".strip() if done.returncode else done.stdout.strip()


def main(prompt):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    for _ in range(MAX_CALLS):
        reply = ask(messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return reply.get("content")
        for call in reply["tool_calls"]:
            if (result := run(call["function"]["arguments"])) == DONE:
                return "Done."
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result[-400:]})
    return "I am out of calls."


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
