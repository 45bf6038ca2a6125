import json

import openai

import agl_core.capture
from tests.conformance.driver import CHAT, Driver, Gap
from tests.conformance.scenarios import TOOLS

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


class TinyDriver(Driver):
    """A framework of forty lines: one agent, tools, chat completions."""

    name = "tiny"
    apis = (CHAT,)
    streaming = (False,)
    gaps = tuple(
        Gap(name, "Not written yet.")
        for name in (
            "structured output",
            "tool errors",
            "compacted context",
            "interleaved sub-agents",
            "hierarchy",
            "handoff",
            "text ReAct",
            "samples of one prompt",
            "three choices (n)",
            "two agents in parallel",
        )
    )

    def build(self, scenario, setting):
        (agent, *others) = scenario.agents
        if others or set(agent.tools) - {"add", "multiply"} or not agent.tools:
            raise NotImplementedError
        client = openai.AsyncOpenAI(base_url=setting.base_url, api_key=setting.api_key, max_retries=setting.retries)
        tools = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in agent.tools]

        async def program(question):
            messages = [{"role": "system", "content": agent.prompt}, {"role": "user", "content": question.text}]
            with agl_core.capture.identify(agent.name):
                while True:
                    reply = await client.chat.completions.create(model="default", messages=messages, tools=tools)
                    message = reply.choices[0].message
                    messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
                    if not message.tool_calls:
                        return
                    for call in message.tool_calls:
                        result = TOOLS[call.function.name](**json.loads(call.function.arguments))
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})

        return program
