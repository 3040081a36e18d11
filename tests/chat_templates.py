"""Chat templates in the styles that models have, and conversations to put through them."""

from __future__ import annotations

from typing import Any

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- set said = message.content or '' %}
        {%- if '</think>' in said %}
            {%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {%- generation %}{{- said }}{%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson(indent=2)) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- if not date is defined %}{%- set date = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date + "\\n" + system + eos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' }}
    {{- (message['content'] or '') | trim ~ eos_token }}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=4, sort_keys=true) }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

HARMONY = """\
{%- macro told(kind, text) -%}
<|start|>{{ kind }}<|message|>{{ text }}<|end|>
{%- endmacro -%}
{{- told('system', 'Reasoning: ' ~ (reasoning_effort | default('medium')) ~ '\\nChannels: analysis, final.') }}
{%- if tools %}
    {{- told('developer', 'namespace functions {' ~ (tools | map(attribute='function.name') | join(', ')) ~ '}') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking is defined and loop.last %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" ~ message.thinking ~ "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" ~ message.content ~ "<|end|>" }}
    {%- else %}
        {{- told(message.role if message.role != 'system' else 'developer', message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(system='', first=true) %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set ns.system = ns.system + ('' if ns.first else '\\n\\n') + message['content'] %}{% set ns.first = false %}
{%- endfor %}
{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
    {% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if content and '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{ '<|Assistant|>' + (content or '') + eos_token }}
    {% endif %}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

MISTRAL = """\
{%- set names = dict(user='[INST] ', assistant='') %}
{{ bos_token }}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant/user/assistant') }}
{%- endif %}
{{ names[message.role] }}{{ message.content }}{{ ' [/INST]' if message.role == 'user' else eos_token }}
{% endfor %}
"""

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "harmony": HARMONY, "deepseek": DEEPSEEK, "mistral": MISTRAL}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "What is it <like> in é & 'x'?",
     "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
]  # fmt: skip
USER, ANSWER = {"role": "user", "content": " What's <5>? & é 日本 "}, {"role": "assistant", "content": "Five.\n"}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "three": [USER, ANSWER, USER],
    "long": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "thoughts": [USER, {**ANSWER, "reasoning_content": "hm\n5"}, USER, {**ANSWER, "thinking": "again"}],
    "thoughts inside": [USER, {**ANSWER, "content": "<think>\nhm\n</think>\n\nFive."}, USER],
    "nothing said": [USER, {"role": "assistant", "content": None, "reasoning": "x"}, USER],
    "call": [USER, {**ANSWER, "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Köln"}}}]}],
    "wrong order": [ANSWER, USER],
    "wrong role": [USER, {"role": "narrator", "content": "x"}],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "continued": {"to_be_answered": False},
    "tools": {"tools": TOOLS},
    "variables": {"variables": {"enable_thinking": False, "reasoning_effort": "high", "date": "1 May"}},
}
