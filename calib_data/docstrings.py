"""Take (input, summary line) pairs out of Python source text, without importing it."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterator

SUMMARY_WORDS = (4, 20)  # shortest and longest summary
BODY_WORDS = 6  # shortest body
INPUT_CHARS = 700  # the body is cut here
UNWANTED = re.compile(r"[^\x20-\x7e]|https?://|^\W|\.\. |>>>|::|deprecated|%\(|\{\{", re.IGNORECASE)

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def split_docstring(text: str) -> tuple[str, str] | None:
    """(summary line, body) of a docstring in PEP 257 form, or None when it has another form."""
    lines = inspect.cleandoc(text).split("\n")
    if len(lines) < 3 or lines[1].strip():
        return None
    summary = " ".join(lines[0].split())
    body = " ".join(" ".join(lines[2:]).split())
    return summary, body


def is_useful(summary: str, body: str) -> bool:
    """True for an English sentence of fitting length that the body does not hold verbatim."""
    words = len(summary.split())
    if not SUMMARY_WORDS[0] <= words <= SUMMARY_WORDS[1] or len(body.split()) < BODY_WORDS:
        return False
    if not summary.endswith(".") or UNWANTED.search(summary):
        return False
    return normal(summary) not in normal(body)


def normal(text: str) -> str:
    """Lower-case letters and digits, other characters as single spaces: the form in which copies are sought."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def signature(node: Documented, owner: str) -> str:
    """``Owner.name(first, second)`` of a function, ``class Name`` of a class."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    names = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    names = [name for name in names if name not in ("self", "cls")][:6]
    return f"{owner + '.' if owner else ''}{node.name}({', '.join(names)})"


def documented(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, str]]:
    """(signature, docstring) of every class and function below ``tree``, in order of the source."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Documented):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield signature(node, owner), text
        inner = node.name if isinstance(node, ast.ClassDef) else owner
        yield from documented(node, inner)


def pairs(source: str) -> Iterator[dict[str, str]]:
    """Rows of one module; a module that does not parse gives none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source, feature_version=(3, 10))
    except (SyntaxError, ValueError, RecursionError):
        return
    for head, text in documented(tree):
        cut = split_docstring(text)
        if cut and is_useful(*cut):
            yield {"input": f"{head}: {cut[1][:INPUT_CHARS]}", "target": cut[0]}


def without_copies(rows: list[dict[str, str]], seen: set[str]) -> list[dict[str, str]]:
    """Rows whose summary and whose input are not yet in ``seen`` (normal form); adds theirs to it."""
    kept = []
    for row in rows:
        marks = {"s " + normal(row["target"]), "i " + normal(row["input"])[:300]}
        if not marks & seen:
            kept.append(row)
        seen |= marks
    return kept
