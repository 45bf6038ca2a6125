"""Small chat templates with the rules of nine model families about roles, written by their public formats.

`EOS` stands for the mark that ends an assistant's turn, which each family has its own token for.
"""

from __future__ import annotations

from agl_chat.requests import RoleRules

LOOP, END = "{% for m in messages %}", "{% endfor %}"
BEGIN = "{% if add_generation_prompt %}"
EOS = "{{ eos_token }}"

CHATML_TURNS = (
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}"
)
CHATML_TOOLS = "{% if tools %}<|im_start|>system\n# Tools\n\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
CHATML_BEGIN = BEGIN + "<|im_start|>assistant\n{% endif %}"

QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + f"{CHATML_TOOLS}{LOOP}{CHATML_TURNS}{END}{CHATML_BEGIN}"
)
QWEN3 = f"{CHATML_TOOLS}{LOOP}{CHATML_TURNS}{END}{CHATML_BEGIN}"
QWEN35 = (
    "{% if 'user' not in messages | map(attribute='role') %}{{ raise_exception('There is no user query.') }}{% endif %}"
    + CHATML_TOOLS
    + LOOP
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System is not first.') }}{% endif %}"
    + f"{CHATML_TURNS}{END}{CHATML_BEGIN}"
)
LLAMA3 = (
    "{% set head = '<|start_header_id|>%s<|end_header_id|>\n\n' %}<|begin_of_text|>"
    + LOOP
    + "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('One call at once.') }}{% endif %}"
    + "{{ head | format('ipython' if m.role == 'tool' else m.role) }}"
    + '{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    + "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content | trim }}{% endif %}"
    + f"{EOS}{END}{BEGIN}{{{{ head | format('assistant') }}}}{{% endif %}}"
)
GEMMA3 = (
    "<bos>{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if first else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first }}{{ m.content | trim }}"
    + f"{EOS}\n{END}{BEGIN}<start_of_turn>model\n{{% endif %}}"
)
GPT_OSS = (
    "<|start|>system<|message|>You are ChatGPT.<|end|>"
    "{% set told = messages[0].role in ['system', 'developer'] %}"
    "{% if told %}<|start|>developer<|message|># Instructions\n\n{{ messages[0].content }}<|end|>{% endif %}"
    "{% set past = namespace(call=none) %}{% for m in (messages[1:] if told else messages) %}"
    "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}"
    "{% if not past.call %}{{ raise_exception('A result without a call.') }}{% endif %}"
    "<|start|>functions.{{ past.call }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' and m.tool_calls %}{% set past.call = m.tool_calls[0].function.name %}"
    "<|start|>assistant<|channel|>commentary to=functions.{{ past.call }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    + f"{EOS}{{% endif %}}{END}{BEGIN}<|start|>assistant<|channel|>final<|message|>{{% endif %}}"
)
GLM45 = (
    f"[gMASK]<sop>{LOOP}"
    "{% if m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}{{ eos_token if m.role == 'assistant' }}{% endif %}"
    + f"{END}{BEGIN}<|assistant|>\n{{% endif %}}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{{ messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | "
    "join('\n\n') }}" + LOOP + "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "<｜tool▁outputs▁end｜>"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{% endfor %}"
    + f"{EOS}{{% endif %}}{END}{BEGIN}<｜Assistant｜>{{% endif %}}"
)
MISTRAL = (
    "<s>{% set told = messages[0].content if messages[0].role == 'system' %}"
    "{% set turns = messages[1:] if told else messages %}{% set count = namespace(n=0) %}"
    "{% for m in turns %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (count.n % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{% set count.n = count.n + 1 %}{% endif %}{% endfor %}"
    "{% set asked = turns | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in turns %}"
    "{% if tools and m == asked[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% if m.role == 'user' %}[INST]{{ told + '\n\n' if told and loop.last }}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('A long id.') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]" + EOS + "{% elif m.role == 'assistant' %}{{ m.content }}" + EOS + "{% else %}"
    "{{ raise_exception('A system message must come first.') }}{% endif %}{% endfor %}"
)

RESULTS = frozenset({"user", "tool"})
TEMPLATES: dict[str, tuple[str, RoleRules]] = {
    "Qwen2.5": (QWEN25, RoleRules(2, frozenset())),
    "Qwen3": (QWEN3, RoleRules(2, frozenset())),
    "Qwen3.5 raises": (QWEN35, RoleRules(1, frozenset())),
    "Llama 3": (LLAMA3, RoleRules(2, frozenset())),
    "Gemma 3 alternates": (GEMMA3, RoleRules(1, RESULTS)),
    "gpt-oss drops": (GPT_OSS, RoleRules(1, frozenset())),
    "GLM 4.5": (GLM45, RoleRules(2, frozenset())),
    "DeepSeek moves to the top": (DEEPSEEK, RoleRules(1, frozenset())),
    "Mistral shows before the last user's": (MISTRAL, RoleRules(0, RESULTS)),
}
"""By family: the template, and the rules that are found by trying it."""
