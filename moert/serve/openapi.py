"""The description of the server's paths in OpenAPI 3.1, from the forms that requests are checked by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.routing import Route

from moert import __version__
from moert.serve import anthropic, ollama, openai, responses
from moert.serve.fields import Form

_TEXT, _TABLE = {"type": "string"}, {"type": "object"}
_OPENAI = {"message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}
_ANTHROPIC = {"type": _TEXT, "message": _TEXT, "details": _TABLE}
_KINDS = {"/": "text/html", "/metrics": "text/plain"}
_ASKED_BY_NAME = ("/props", "/slots")


def description(routes: Iterable[Route], own: Mapping[str, Form], models: Sequence[str]) -> dict[str, Any]:
    """Returns the description of `routes`. `own`: forms of paths that belong to no interface."""
    forms = {**own, **openai.FORMS, **responses.FORMS, **anthropic.FORMS, **ollama.FORMS}
    names = {"enum": [*models, *(f"{name}:latest" for name in models)]}
    paths = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        (method,) = (route.methods or set()) - {"HEAD"}
        paths[path] = {method.lower(): _operation(path, forms.get(path), names)}
    info = {"title": "moert serve", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def _operation(path: str, form: Form | None, names: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {_KINDS.get(path, "application/json"): {} if path in _KINDS else {"schema": {"type": ["object", "array"]}}}
    if form is not None and "stream" in form.fields:
        kinds["application/x-ndjson" if path.startswith("/api/") else "text/event-stream"] = {}
    answers = {
        "200": {"description": "the answer", "content": kinds},
        "default": {"description": "an error", "content": {"application/json": {"schema": _error(path)}}},
    }
    made: dict[str, Any] = {"responses": answers}
    if form is not None:
        body = {"application/json": {"schema": _schema(form, names)}}
        made["requestBody"] = {"required": True, "content": body}
    elif "{name}" in path:
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": names}]
    elif path in _ASKED_BY_NAME:
        made["parameters"] = [{"name": "model", "in": "query", "schema": names}]
    return made


def _schema(form: Form, names: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a body; a field that need not be there may be null."""
    fields = {name: names if name == "model" else dict(field.schema) for name, field in form.fields.items()}
    fields |= {name: {} for name in form.without_effect}
    properties = {
        name: schema if name in form.needed or not schema else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in fields.items()
    }
    needed = {"required": [*form.needed]} if form.needed else {}
    return {"type": "object", "properties": properties, **needed, "additionalProperties": False}


def _error(path: str) -> dict[str, Any]:
    """Returns the schema of an error, which each interface has its own form of."""
    if path.startswith("/api/"):
        return {"type": "object", "properties": {"error": _TEXT}, "required": ["error"]}
    fields = _ANTHROPIC if path.startswith("/v1/messages") else _OPENAI
    error = {"type": "object", "properties": fields, "required": ["type", "message"]}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
