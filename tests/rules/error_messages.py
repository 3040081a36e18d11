"""Messages of the errors that a user can get, read from the source: templates in which NAMES stand for values."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from moeconv.tuned import said as in_moeconv
from moert.command.settings import OPTIONS
from moert.described import tuned

ROOT = Path(__file__).resolve().parents[2]
MOST_FORMS = 3
"""Of one message; one with more has the name of its part in the part's place."""
_AS_IT_IS = {"brief", "line", "str", "repr", "in_one_line", "last_line", "sorted", "list", "_short", "_first_line"}
_NUMBERS = {"len", "min", "max", "sum", "ceil", "round", "numel", "size"}
_REACHED = {
    ast.RShift: operator.rshift, ast.LShift: operator.lshift, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Pow: operator.pow,
}  # fmt: skip
_OWNERS = {"name", "path", "root", "n", "value", "given", "shape", "key", "host", "relative", "pack", "named"}
_REASONS = {"error", "why", "reason", "strerror", "wrong", "contradiction", "fault"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A module of the packages: its dotted name, and its tree."""

    name: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """Returns the path of the folder, or of the module beside all folders."""
        return "/".join(self.name.split(".")[:2])

    @cached_property
    def constants(self) -> Mapping[str, ast.expr]:
        """Returns the values that names of the module have."""
        found: dict[str, ast.expr] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                found[node.target.id] = node.value
        return found

    @cached_property
    def imported(self) -> Mapping[str, tuple[str, str]]:
        """Returns names → the module that they come from, and their names there."""
        return {
            each.asname or each.name: (node.module, each.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for each in node.names
        }

    @cached_property
    def functions(self) -> Mapping[str, Function]:
        """Returns the functions and methods of the module."""
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, Function)}


@dataclass(frozen=True)
class Scope:
    """A place in the source: the function around it, and the arguments that this is called with."""

    module: Module
    function: Function | None = None
    bound: Mapping[str, tuple[ast.expr, Scope]] = field(default_factory=dict)

    @cached_property
    def assigned(self) -> Mapping[str, list[ast.expr]]:
        """Returns the local names that are assigned, each with all its values."""
        found: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.function) if self.function else ():
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, []).append(node.value)
        return found


@dataclass(frozen=True, order=True)
class Message:
    """A message: the name of its error's class, the room that it comes from, and the status of HTTP beside it."""

    kind: str
    room: str
    text: str
    status: str = ""


class Source:
    """The source of both packages."""

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}
        for path in sorted(path for name in ("moert", "moeconv") for path in (ROOT / name).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(name, ast.parse(path.read_text(encoding="utf-8")))
        self.calls: list[tuple[ast.Call, Scope]] = []
        for module in self.modules.values():
            self._walk(module, module.tree, None)
        self.by_name: dict[str, list[tuple[ast.Call, Scope]]] = {}
        for call, scope in self.calls:
            self.by_name.setdefault(_called(call), []).append((call, scope))

    def _walk(self, module: Module, node: ast.AST, around: Function | None) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                self.calls.append((child, Scope(module, around)))
            self._walk(module, child, child if isinstance(child, Function) else around)

    @cached_property
    def classes(self) -> Mapping[tuple[str, str], ast.ClassDef]:
        """Returns all classes of exceptions by their modules and names."""
        found: dict[tuple[str, str], ast.ClassDef] = {}
        left = [
            (module, node)
            for module in self.modules.values()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        ]
        builtin = {"Exception", "ValueError", "MemoryError", "OSError", "TemplateError"}
        while grown := [
            (module, node)
            for module, node in left
            if any(
                isinstance(base, ast.Name) and (base.id in builtin or self.named(module, base.id) in found)
                for base in node.bases
            )
        ]:
            found |= {(module.name, node.name): node for module, node in grown}
            left = [each for each in left if each not in grown]
        return found

    def named(self, module: Module, name: str) -> tuple[str, str]:
        """Returns the module that defines a name which another one uses, and its name there."""
        at = (module.name, name)
        while at[0] in self.modules and at[1] in self.modules[at[0]].imported:
            at = self.modules[at[0]].imported[at[1]]
        return at

    def messages(self, of: tuple[str, str]) -> Iterator[Message]:
        """Yields the messages of a class, each in all its forms."""
        for call, scope in self.by_name.get(of[1], []):
            if self.named(scope.module, of[1]) != of or not isinstance(call.func, ast.Name):
                continue
            for text, at in self._of(of, call, scope):
                if re.search(r"[a-z]{2}", text):
                    yield Message(of[1], at.module.room, text, _status(call))

    def _of(self, of: tuple[str, str], call: ast.Call, scope: Scope) -> Iterator[tuple[str, Scope]]:
        """Yields the messages of one call of a class, also those that callers of the function around it give it."""
        for at in self.callers(scope, call):
            outer = at.bound["\0"][1] if "\0" in at.bound else at
            made = _init(self.classes[of])
            if made is None:
                texts = self.render(call.args[0], at) if call.args else []
            else:
                function, template = made
                own = self.modules[of[0]]
                texts = self.render(template, Scope(own, function, _arguments(function, call, at)))
            for text in texts:
                yield " ".join(text.split()).removeprefix(": "), outer

    def callers(self, scope: Scope, site: ast.AST, depth: int = 3) -> list[Scope]:
        """Returns the scope of a site with each set of texts that callers give the function around it; the scope itself
        if none of them gives a text."""
        function = scope.function
        if function is None or not depth:
            return [scope]
        names = set(_names(site))
        names |= {name for each in [*names] for value in scope.assigned.get(each, []) for name in _names(value)}
        taken = names & {each.arg for each in _parameters(function)}
        found = []
        for call, caller in self.by_name.get(function.name, []) if taken else []:
            if caller.function is function or not self._is(function, scope.module, call, caller.module):
                continue
            given = {name: each for name, each in _arguments(function, call, caller).items() if name in taken}
            texts = [name for name, (value, _) in given.items() if _is_text(value, caller)]
            if not texts and not any(_passes(value, caller) for value, _ in given.values()):
                continue
            for upper in self.callers(caller, call, depth - 1):
                if not texts and not upper.bound:
                    continue
                outer = upper.bound["\0"][1] if "\0" in upper.bound else upper
                bound = {name: (value, upper) for name, (value, _) in given.items()}
                found.append(Scope(scope.module, function, bound | {"\0": (call, outer)}))
        return found or [scope]

    def _is(self, function: Function, home: Module, call: ast.Call, module: Module) -> bool:
        """Returns whether a call in a module is one of this function of another one."""
        if isinstance(call.func, ast.Name):
            return self.named(module, function.name) == (home.name, function.name)
        some = [each for each in _parameters(function) if each.arg not in ("self", "cls")]
        least = len(some) - len(function.args.defaults)
        fits = least <= len(call.args) + len(call.keywords) <= len(some) + len(function.args.kwonlyargs)
        near = home.name.startswith("moert.pack.") or home.room == module.room
        return fits and near and len(some) < len(_parameters(function))

    def render(self, value: ast.expr, scope: Scope, depth: int = 6) -> list[str]:
        """Returns the forms of a text."""
        forms = self._render(value, scope, depth) if depth else []
        forms = [form for form in forms if form != "None"] or [_placeholder(value)]
        return list(dict.fromkeys(forms)) if len(set(forms)) <= MOST_FORMS else [_placeholder(value)]

    def _render(self, value: ast.expr, scope: Scope, depth: int) -> list[str]:
        if isinstance(value, ast.Constant):
            return [str(value.value)]
        if isinstance(value, ast.JoinedStr):
            return self._joined(value.values, scope, depth)
        if isinstance(value, ast.FormattedValue):
            return self.render(value.value, scope, depth)
        if isinstance(value, ast.IfExp):
            return self.render(value.body, scope, depth) + self.render(value.orelse, scope, depth)
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            return self._joined([value.left, value.right], scope, depth)
        if isinstance(value, ast.BoolOp):
            return self.render(value.values[-1 if isinstance(value.op, ast.And) else 0], scope, depth)
        if isinstance(value, ast.Name):
            return self._named(value, scope, depth)
        if isinstance(value, ast.Call):
            return self._call(value, scope, depth)
        if isinstance(value, ast.BinOp) and (number := self._number(value, scope.module)) is not None:
            return [f"{number:,}"]
        return [_placeholder(value)]

    def _joined(self, parts: Sequence[ast.expr], scope: Scope, depth: int) -> list[str]:
        """Returns the forms of parts behind each other."""
        whole = [""]
        for part in parts:
            ends = self.render(part, scope, depth)
            if len(whole) * len(ends) > MOST_FORMS:
                ends = ends[:1] if _has_words(part, " ") else [_placeholder(part)]
            whole = [_joined(begin, end) for begin in whole for end in ends]
        return whole

    def _named(self, value: ast.Name, scope: Scope, depth: int) -> list[str]:
        if value.id in scope.bound:
            return self.render(*scope.bound[value.id], depth - 1)
        values = scope.assigned.get(value.id, [])
        if values and any(map(_has_words, values)):
            return [form for each in values for form in self.render(each, scope, depth - 1)]
        at = self.named(scope.module, value.id)
        constant = self.modules[at[0]].constants.get(at[1]) if at[0] in self.modules else None
        if isinstance(constant, (ast.Constant, ast.JoinedStr)) and value.id.isupper():
            return self.render(constant, Scope(self.modules[at[0]]), depth - 1)
        return [_placeholder(value)]

    def _call(self, value: ast.Call, scope: Scope, depth: int) -> list[str]:
        name = _called(value)
        if name in ("said", "tuned"):
            names = self.render(value.args[0], scope, depth)
            given = self.render(value.args[1], scope, depth) if len(value.args) > 1 else [None]
            option = tuned if name == "tuned" else partial(_option, module=scope.module.name)
            return [option(one, each) for one in names for each in given]
        if name == "join" and isinstance(inner := value.args[0], ast.Call) and _called(inner) == "split":
            return self.render(inner.func.value if isinstance(inner.func, ast.Attribute) else inner, scope, depth)
        if name in _AS_IT_IS and value.args:
            return self.render(value.args[0], scope, depth)
        if name in _NUMBERS or name == "join" or not isinstance(value.func, ast.Name):
            return [_placeholder(value)]
        at = self.named(scope.module, name)
        function = self.modules[at[0]].functions.get(at[1]) if at[0] in self.modules else None
        if function is None:
            return [_placeholder(value)]
        results = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
        if not any(map(_has_words, results)):
            return [_placeholder(value)]
        inner = Scope(self.modules[at[0]], function, _arguments(function, value, scope))
        return [form for each in results for form in self.render(each, inner, depth - 1)]

    def _number(self, value: ast.expr, module: Module) -> int | float | None:
        """Returns the number that constants make, such as 1 << 20."""
        if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)):
            return value.value
        if isinstance(value, ast.Name):
            at = self.named(module, value.id)
            found = self.modules[at[0]].constants.get(at[1]) if at[0] in self.modules else None
            return found and self._number(found, self.modules[at[0]])
        if not isinstance(value, ast.BinOp) or type(value.op) not in _REACHED:
            return None
        left, right = self._number(value.left, module), self._number(value.right, module)
        return None if left is None or right is None else _REACHED[type(value.op)](left, right)


def _joined(begin: str, end: str) -> str:
    """Returns both texts, with a space where a NAME would else grow into a word."""
    edge = begin[-1:].isalpha() and end[:1].isalpha() and (end[:2].isupper() or begin[-2:].isupper())
    return f"{begin} {end}" if edge else begin + end


def _names(node: ast.AST) -> Iterator[str]:
    return (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _called(call: ast.Call) -> str:
    """Returns the name of the function or method that is called."""
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _parameters(function: Function) -> list[ast.arg]:
    return function.args.posonlyargs + function.args.args


def _arguments(function: Function, call: ast.Call, scope: Scope) -> dict[str, tuple[ast.expr, Scope]]:
    """Returns the arguments of a call by the names of the function's parameters."""
    names = [each.arg for each in _parameters(function) if each.arg not in ("self", "cls")]
    values = dict(zip(names, call.args, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}
    return {name: (value, scope) for name, value in values.items() if not isinstance(value, ast.Starred)}


def _init(of: ast.ClassDef) -> tuple[Function, ast.expr] | None:
    """Returns the __init__ of a class that words the message itself, and the message."""
    for node in ast.walk(of):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for call in (each for each in ast.walk(node) if isinstance(each, ast.Call) and _called(each) == "__init__"):
                return node, call.args[0]
    return None


def _status(call: ast.Call) -> str:
    """Returns the status of HTTP that an answer of the server has."""
    given = [each.value for each in call.keywords if each.arg == "status"] + call.args[2:3]
    return str(given[0].value) if given and isinstance(given[0], ast.Constant) else ""


def _has_words(value: ast.expr, behind: str = "") -> bool:
    """Returns whether an expression is a text with a word, and this text `behind` it, or a choice of such texts."""
    if isinstance(value, ast.IfExp):
        return _has_words(value.body, behind) or _has_words(value.orelse, behind)
    if isinstance(value, ast.BinOp):
        return _has_words(value.left, behind) or _has_words(value.right, behind)
    parts = value.values if isinstance(value, ast.JoinedStr) else [value]
    text = "".join(str(each.value) for each in parts if isinstance(each, ast.Constant))
    return bool(re.search(f"[a-z]{{2,}}{behind}", text))


def _is_text(value: ast.expr, scope: Scope) -> bool:
    """Returns whether an argument is a text of several words, where it is given or where it was assigned."""
    return _has_words(value, " ") or (
        isinstance(value, ast.Name) and any(_has_words(each, " ") for each in scope.assigned.get(value.id, []))
    )


def _passes(value: ast.expr, scope: Scope) -> bool:
    """Returns whether an argument is one that the function around the call was given itself."""
    own = {each.arg for each in _parameters(scope.function)} if scope.function else set()
    return any(isinstance(node, ast.Name) and node.id in own for node in ast.walk(value))


def _option(name: str, value: str | None, module: str) -> str:
    """Returns the words of the command line for a setting; the name alone for one that only Python has."""
    if module.startswith("moeconv."):
        return in_moeconv(name, value) if not name.isupper() else " ".join(filter(None, (name, value)))
    option = OPTIONS.get(name, name)
    return option if value is None else f"{option}{'=' if ' ' in option else ' '}{value}"


def _is_number(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, (int, float))


def _placeholder(value: ast.AST) -> str:
    """Returns the NAME that stands for a value."""
    if isinstance(value, ast.FormattedValue):
        return _placeholder(value.value)
    if isinstance(value, ast.Call):
        name = _called(value)
        if name in ("size", "len", "sum", "ceil", "round", "numel"):
            return "SIZE" if name == "size" else "NUMBER"
        if name in ("join", "getattr"):
            return "NAMES" if name == "join" else "VALUE"
        inner = value.func.value if isinstance(value.func, ast.Attribute) and not value.args else None
        return _placeholder(inner or value.args[0]) if inner or value.args else name.strip("_").upper()
    if isinstance(value, ast.Attribute):
        owner = getattr(value.value, "id", getattr(value.value, "attr", ""))
        word = owner if value.attr in _OWNERS and owner not in ("self", "cls") else value.attr
    elif isinstance(value, ast.Name):
        word = value.id
    elif isinstance(value, (ast.Subscript, ast.Starred)):
        return _placeholder(value.value)
    elif isinstance(value, (ast.BoolOp, ast.Compare)):
        return _placeholder(value.values[0] if isinstance(value, ast.BoolOp) else value.left)
    elif isinstance(value, (ast.BinOp, ast.UnaryOp)):
        path = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)
        return "PATH" if path and not _is_number(value.left) and not _is_number(value.right) else "NUMBER"
    else:
        return "VALUE"
    return "REASON" if word in _REASONS else word.strip("_").upper().replace("_", " ")
