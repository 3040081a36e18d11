"""Replies of models that call tools, in the form of each family, with the calls that they are."""

from __future__ import annotations

from typing import Any, NamedTuple

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"},
            "at": {"type": "object"}, "tags": {"type": "array", "items": {"type": "string"}},
            "limit": {"type": ["number", "null"]}, "mode": {"enum": ["now", "later"]},
        },
        "required": ["city"],
    }}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip


class Transcript(NamedTuple):
    """`written`: the reply; `calls`: names with arguments as JSON text; `before` and `after`: text around them."""

    form: str
    written: str
    calls: tuple[tuple[str, str], ...]
    before: str = ""
    after: str = ""


TRANSCRIPTS: dict[str, Transcript] = {
    "hermes": Transcript(
        "hermes",
        'I will look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "K\\u00f6ln", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        (("get_weather", '{"city": "K\\u00f6ln", "days": 3}'), ("now", "{}")), "I will look.",
    ),
    "hermes, the mark in a text, and text behind": Transcript(
        "hermes",
        '<tool_call>{"arguments": {"city": "</tool_call> \\" {[", "at": {"a": [1, {"b": null}]}}, '
        '"name": "get_weather"}</tool_call>\n\nDone.',
        (("get_weather", '{"city": "</tool_call> \\" {[", "at": {"a": [1, {"b": null}]}}'),), after="Done.",
    ),
    "hermes without arguments, or with JSON in a text": Transcript(
        "hermes",
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}</tool_call>'
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": "{\\"a\\": 1}"}}</tool_call>',
        (("now", "{}"), ("now", "{}"), ("now", '{"a": 1}')),
    ),
    "granite 4, a list": Transcript(
        "hermes", '<tool_call>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {"a": 1}}]</tool_call>',
        (("now", "{}"), ("now", '{"a": 1}')),
    ),
    "qwen3-coder": Transcript(
        "qwen_coder",
        "Let me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n"
        '3\n</parameter>\n<parameter=metric>\ntrue\n</parameter>\n<parameter=at>\n{"a": [1, true]}\n</parameter>\n'
        "<parameter=tags>\n['x', \"y\"]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n"
        "</function>\n</tool_call>",
        (
            (
                "get_weather",
                '{"city": "Paris", "days": 3, "metric": true, "at": {"a": [1, true]}, "tags": ["x", "y"]}',
            ),
            ("now", "{}"),
        ), "Let me see.",
    ),
    "qwen3-coder, lines, a number as text, no outer mark": Transcript(
        "qwen_coder",
        "<function=get_weather>\n<parameter=city>\n12\nline <b>\n\n</parameter>\n<parameter=limit>\nNone\n"
        "</parameter>\n<parameter=other>\n[1]\n</parameter>\n</function>\nafter",
        (("get_weather", '{"city": "12\\nline <b>\\n", "limit": null, "other": [1]}'),), after="after",
    ),
    "seed": Transcript(
        "seed",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>",
        (("get_weather", '{"city": "Paris", "days": 2}'),),
    ),
    "glm 4.5": Transcript(
        "glm",
        "\nLooking.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>42</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>42</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        (("get_weather", '{"city": "42", "days": 42}'), ("now", "{}")), "\nLooking.",
    ),
    "glm 4.7, without lines": Transcript(
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bonn</arg_value><arg_key>at</arg_key>"
        '<arg_value>{"x": 1.5}</arg_value></tool_call>',
        (("get_weather", '{"city": "Bonn", "at": {"x": 1.5}}'),),
    ),
    "deepseek v3": Transcript(
        "deepseek_v3",
        "So: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (("get_weather", '{"city": "Paris"}'), ("now", "{}")), "So:",
    ),
    "deepseek v3.1": Transcript(
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (("get_weather", '{"city": "Paris"}'), ("now", "{}")),
    ),
    "deepseek v3.2": Transcript(
        "dsml",
        'Yes\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">3</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        (("get_weather", '{"city": "3", "days": 3}'), ("now", "{}")), "Yes",
    ),
    "kimi": Transcript(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        (("get_weather", '{"city": "Paris"}'), ("now", "{}")),
    ),
    "minimax": Transcript(
        "minimax",
        'A moment.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="metric">true</parameter>\n<parameter name="tags">["a"]</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        (("get_weather", '{"city": "Paris", "metric": true, "tags": ["a"]}'), ("now", "{}")), "A moment.",
    ),
    "mistral": Transcript(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdef123"}, '
        '{"name": "now", "arguments": {}}]',
        (("get_weather", '{"city": "Paris"}'), ("now", "{}")),
    ),
    "mistral, names": Transcript(
        "mistral_names", 'Well.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
        (("get_weather", '{"city": "Paris"}'), ("now", "{}")), "Well.",
    ),
    "mistral, a name and braces": Transcript(
        "mistral_names", '[TOOL_CALLS]get_weather{"city": "Paris"}', (("get_weather", '{"city": "Paris"}'),),
    ),
    "gemma 4": Transcript(
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Pa{r},is "x"<|"|>,days:3,metric:true,at:{x:[1,<|"|>b<|"|>],'
        '<|"|>y<|"|>:null}}<tool_call|><|tool_call>call:now{}<tool_call|>',
        (
            (
                "get_weather",
                '{"city": "Pa{r},is \\"x\\"", "days": 3, "metric": true, "at": {"x": [1, "b"], "y": null}}',
            ),
            ("now", "{}"),
        ),
    ),
    "functiongemma": Transcript(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
        (("get_weather", '{"city": "Paris", "days": 3}'),),
    ),
    "granite 3": Transcript(
        "granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        (("get_weather", '{"city": "Paris"}'),),
    ),
    "nemotron": Transcript(
        "nemotron", 'Hm. <TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>', (("now", "{}"),), "Hm.",
    ),
    "hunyuan": Transcript(
        "tool_calls", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', (("now", "{}"),),
    ),
    "lfm2": Transcript(
        "lfm2",
        "<|tool_call_start|>[get_weather(city=\"It's\", days=3, metric=True, at={'a': None}), now()]"
        "<|tool_call_end|>Soon.",
        (("get_weather", '{"city": "It\'s", "days": 3, "metric": true, "at": {"a": null}}'), ("now", "{}")),
        after="Soon.",
    ),
    "lfm2, JSON": Transcript(
        "lfm2", '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>', (("now", "{}"),),
    ),
    "llama 4": Transcript(
        "pythonic", '[get_weather(city="Paris", days=-2), now()]',
        (("get_weather", '{"city": "Paris", "days": -2}'), ("now", "{}")),
    ),
    "llama 3": Transcript(
        "llama", '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        (("get_weather", '{"city": "Paris"}'), ("now", "{}")),
    ),
    "llama 3, with a tag": Transcript(
        "llama", '<|python_tag|>{"type": "function", "name": "now", "parameters": {"a": "1"}}',
        (("now", '{"a": "1"}'),),
    ),
    "llama 3, a built-in tool": Transcript(
        "llama", '<|python_tag|>brave_search.call(query="what, now?")', (("brave_search", '{"query": "what, now?"}'),),
    ),
    "cohere": Transcript(
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        (("get_weather", '{"city": "Paris"}'), ("now", "{}")),
    ),
    "gpt-oss": Transcript(
        "harmony",
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris"}<|call|>',
        (("get_weather", '{"city":"Paris"}'),),
    ),
    "gpt-oss, the name first": Transcript(
        "harmony", ' to=functions.now<|channel|>commentary json<|message|>{}<|call|>', (("now", "{}"),),
    ),
    "gpt-oss, without marks that hide": Transcript(
        "harmony", "<|channel|>commentary to=functions.now json<|message|>{ }", (("now", "{ }"),),
    ),
}  # fmt: skip
