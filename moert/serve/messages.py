"""Conversations of OpenAI's interface as chat templates take them: calls of tools, and their results."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from moert.serve.calls import Format
from moert.serve.forcing import FORMS, Written

Message = Mapping[str, Any]
_JOINED = re.compile(r"\+\s*[\w.\[\]'\"]*\barguments\b['\"\]]*\s*\+")
"""Templates that put arguments between other texts, and so take them as text; others take tables, or both."""
_ROLE = re.compile(r"role['\"\]]* == ['\"]tool_response")
"""Templates that know results of tools by that role."""
_NUMBERED, _SHORT = "kimi", ("mistral", "mistral_names")
_LETTERS = 9  # of an id in Mistral's templates, which refuse others


def for_template(messages: Sequence[Message], template: str, format: Format | None) -> list[dict[str, Any]]:
    """Returns the messages of OpenAI's interface as a chat template takes them.

    Arguments become tables, or stay text where the template joins them with text; arguments that are no JSON object
    stand in a table under `arguments`. Ids of calls become those that the family knows (`functions.NAME:0` of Kimi,
    nine letters of Mistral), and each result gets the name of its tool. Where a template knows nothing of calls, they
    are written into the message as the model writes them. Parts of text are joined; the role `developer` is `system`
    where the template does not name it.
    """
    ids = _ids(messages, format)
    names = {str(call.get("id")): _function(call).get("name") for each in messages for call in _calls(each)}
    return [_message(each, template, format, (ids, names)) for each in messages]


def _message(
    message: Message, template: str, format: Format | None, known: tuple[Mapping[str, str], Mapping[str, Any]]
) -> dict[str, Any]:
    ids, names = known
    made = {**message, "content": _content(message.get("content"))}
    if made.get("role") == "developer" and "developer" not in template:
        made["role"] = "system"
    if made.get("role") == "tool" and _ROLE.search(template) is not None:
        made["role"] = "tool_response"
    if message.get("role") == "tool":
        number = str(message.get("tool_call_id"))
        made |= {"tool_call_id": ids.get(number, number)}
        if name := message.get("name") or names.get(number):
            made["name"] = name
    calls = [_call(each, ids, _JOINED.search(template) is not None) for each in _calls(message)]
    made.pop("tool_calls", None)
    if not calls:
        return made
    if "tool_calls" in template or format is None or format.name not in FORMS:
        return {**made, "content": made["content"] or "", "tool_calls": calls}
    return {**made, "content": (made["content"] or "") + written(format, message)}


def _calls(message: Message) -> list[Mapping[str, Any]]:
    found = message.get("tool_calls") if isinstance(message, Mapping) else None
    listed = found if isinstance(found, Sequence) and not isinstance(found, str) else ()
    return [each for each in listed if isinstance(each, Mapping)]


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    found = call.get("function")
    return found if isinstance(found, Mapping) else {}


def _content(content: Any) -> Any:
    """Returns the text of a message's content; anything but a list of texts stays as it is."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    texts = [each.get("text") if isinstance(each, Mapping) else None for each in content]
    return "".join(each for each in texts if each) if all(isinstance(each, str) for each in texts) else content


def _call(call: Mapping[str, Any], ids: Mapping[str, str], as_text: bool) -> dict[str, Any]:
    function, number = _function(call), str(call.get("id"))
    table = arguments_of(function.get("arguments"))
    given = function.get("arguments")
    text = given if isinstance(given, str) and given.strip() else json.dumps(table, ensure_ascii=False)
    made = {**function, "arguments": text if as_text else table}
    return {**call, "type": "function", "id": ids.get(number, number), "function": made}


def arguments_of(given: Any) -> dict[str, Any]:
    """Returns the arguments of a call as a table: of JSON text, or of a table."""
    if isinstance(given, Mapping):
        return dict(given)
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    try:
        found = json.loads(given)
    except (TypeError, ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": given}


def _ids(messages: Sequence[Message], format: Format | None) -> dict[str, str]:
    """Returns the ids of calls as the family has them, by those of the client."""
    calls = [call for each in messages for call in _calls(each)]
    if format is not None and format.name == _NUMBERED:
        return {str(call.get("id")): f"functions.{_function(call).get('name')}:{at}" for at, call in enumerate(calls)}
    if format is not None and format.name in _SHORT:
        return {str(call.get("id")): _nine(str(call.get("id"))) for call in calls}
    return {}


def _nine(number: str) -> str:
    if re.fullmatch(rf"[A-Za-z0-9]{{{_LETTERS}}}", number):
        return number
    return f"c{zlib.crc32(number.encode('utf-8', 'replace')):0{_LETTERS - 1}x}"


def written(format: Format, message: Message) -> str:
    """Returns the calls of a message as a model of that family writes them; empty where we don't know how."""
    form = FORMS.get(format.name)
    if form is None:
        return ""
    calls = list[str]()
    for at, call in enumerate(_calls(message)):
        function = _function(call)
        before = form.call.replace("$NUMBER", str(at)).replace("$NAME", str(function.get("name")))
        calls.append(f"{before}{_arguments(form, arguments_of(function.get('arguments')))}{form.call_end}")
    return f"{form.begin}{form.between.join(calls)}{form.end}" if calls else ""


def _value(value: Any, quote: str) -> str:
    """Returns a value as JSON, or with a `quote` as Gemma writes it."""
    if not quote or not isinstance(value, (str, list, dict)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_value(each, quote) for each in value)}]"
    return f"{{{','.join(f'{key}:{_value(each, quote)}' for key, each in value.items())}}}"


def _arguments(form: Written, arguments: Mapping[str, Any]) -> str:
    if not form.parameter:
        return json.dumps(arguments, ensure_ascii=False)
    found = list[str]()
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        before = form.parameter.replace("$ISTEXT", "true" if is_text else "false").replace("$KEY", key)
        text = value if is_text and not form.comma else _value(value, form.quote)
        found.append(f"{before}{text}{form.parameter_end}")
    return form.comma.join(found)
