"""Tokenizers of checkpoints: a tokenizer.json made of tiktoken's, SentencePiece's or GPT-2's files, and transformers'
class for chat templates."""

from __future__ import annotations

import ast
import base64
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from moeconv.sentencepiece import TokenizerDamaged, read_pieces, text_of, tokenizer_json
from moeconv.strict_json import NotJson, bounded, parse
from moert.pack.fence import locked
from moert.pack.tensors import TOKENIZER, bound_of
from moert.pack.text import TokenizerUnfit, check_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A tokenizer.json for a checkpoint that has none, made of a file of tiktoken (by transformers' converter; one pattern
# is read from the checkpoint's own code, none of which runs), of SentencePiece, or of GPT-2's two (by transformers).

CONFIG, MODEL_CONFIG = "tokenizer_config.json", "config.json"
_TIKTOKEN = ("tiktoken.model", "*.tiktoken")
_PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_MERGES, VOCABULARY = ("merges.txt",), "vocab.json"
_CODE, _PATTERNS = "tokenization_*.py", ("pat_str", "pattern", "pat")
MOST_BYTES, _MOST_CODE = 1 << 26, 1 << 20
_LONGEST = 512  # bytes of a token, all ways to cut which are tried
_OFFLINE: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def made(folder: Path) -> str | None:
    """Returns the text of a tokenizer.json; None if the folder has one, or no file that it can be made from. Raises
    TokenizerDamaged, or TokenizerUnfit if it would not be the same tokenizer."""
    if (folder / TOKENIZER).is_file():
        return None
    of_merges = _MERGES if (folder / VOCABULARY).is_file() else ()
    for patterns, make in ((_TIKTOKEN, _of_tiktoken), (_PIECES, _of_pieces), (of_merges, _of_merges)):
        files = (file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file())
        if (file := next(files, None)) is not None:
            return _made(folder, file, make)
    return None


def _made(folder: Path, file: Path, make: Callable[[Path, Path], Tokenizer]) -> str:
    try:
        found = make(folder, file)
    except TokenizerUnfit:
        raise
    except Exception as error:  # the libraries raise nothing more precise
        raise TokenizerUnfit(f"can't be made ({' '.join(str(error).split())[:200] or type(error).__name__})") from None
    config = _config(folder)
    for name in _SPECIAL:
        token = text_of(config.get(name))
        if token and found.token_to_id(token) is None:
            raise TokenizerUnfit(f"can't be made of {file.name}: {CONFIG} has no id for its {name} {token[:60]!r}")
    return str(found.to_str())


def _of_pieces(folder: Path, file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        found = read_pieces(bounded(file, MOST_BYTES))
    except (TokenizerDamaged, NotJson, OSError) as error:
        why = str(error).removeprefix("it ")
        raise TokenizerDamaged(f"{file.name} can't be used as a tokenizer, it {why}") from None
    config, settings = _config(folder), _json(folder / MODEL_CONFIG)
    table = tokenizer_json(found, config, str(settings.get("model_type")), _added(folder, config))
    body = json.dumps(table, ensure_ascii=False).encode()
    check_tokenizer(body)
    return locked(lambda: Tokenizer.from_buffer(body))


def _of_merges(folder: Path, file: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    bounded(file, MOST_BYTES)
    ids = _json(folder / VOCABULARY)
    found: Tokenizer = locked(lambda: AutoTokenizer.from_pretrained(str(folder), **_OFFLINE)).backend_tokenizer
    if any(found.token_to_id(token) != number for token, number in ids.items()):
        raise TokenizerUnfit(
            f"can't be made of {file.name}: {CONFIG} names a class that has other ids than {VOCABULARY}"
        )
    check_tokenizer(found.to_str().encode())
    return found


def _added(folder: Path, config: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
    """Returns id → token for all that the checkpoint adds, by the file that transformers reads first."""
    listed = config.get("added_tokens_decoder")
    if listed:
        return {int(number): {**token, "content": text_of(token)} for number, token in listed.items()}
    named = {text_of(config.get(name)) for name in _SPECIAL}
    named.update(map(text_of, config.get("additional_special_tokens") or ()))
    found = _json(folder / "added_tokens.json")
    return {int(number): {"content": text, "special": text in named} for text, number in found.items()}


def _of_tiktoken(folder: Path, ranks: Path) -> Tokenizer:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(path: str) -> dict[bytes, int]:
            lines = (line.split() for line in bounded(Path(path), MOST_BYTES).splitlines() if line)
            found = {base64.b64decode(token): int(rank) for token, rank in lines}
            if max(map(len, found), default=0) > _LONGEST:
                raise TokenizerUnfit(f"can't be made: a token of {Path(path).name} has more than {_LONGEST} bytes")
            return found

    config = _config(folder)
    added = {int(number): text_of(token) for number, token in (config.get("added_tokens_decoder") or {}).items()}
    start = max(Converter.load_tiktoken_bpe(str(ranks)).values()) + 1
    special = [added.get(number, f"<|reserved_token_{number}|>") for number in range(start, max(added, default=0) + 1)]
    pattern = _pattern(folder, config)
    options = {} if pattern is None else {"pattern": pattern}
    converter: Any = Converter
    found: Tokenizer = converter(vocab_file=str(ranks), extra_special_tokens=special, **options).converted()
    return found


def _pattern(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the pattern that cuts text into words, from the checkpoint's code; None if transformers' own is meant.
    Raises TokenizerUnfit if the code has none."""
    if "auto_map" not in config:
        return None
    for file in sorted(folder.glob(_CODE)):
        for node in ast.walk(ast.parse(bounded(file, _MOST_CODE))):
            if not isinstance(node, (ast.Assign, ast.AnnAssign)):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {str(getattr(target, "id", getattr(target, "attr", ""))).lower() for target in targets}
            if names.intersection(_PATTERNS) and (text := "".join(_text(node.value))):
                return text
    raise TokenizerUnfit(f"can't be made: the pattern that cuts text into words stands in no {_CODE} here")


def _text(value: ast.expr | None) -> Iterator[str]:
    """Yields the text of a literal, or of literals that are joined."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "join":
        between, parts = "".join(_text(value.func.value)), value.args[0]
        texts = ["".join(_text(part)) for part in getattr(parts, "elts", [])]
        yield between.join(texts) if all(texts) else ""


def _config(folder: Path) -> Mapping[str, Any]:
    return _json(folder / CONFIG)


def _json(file: Path) -> Mapping[str, Any]:
    try:
        found = parse(bounded(file, MOST_BYTES), finite=False)
    except FileNotFoundError:
        return {}
    except (OSError, NotJson) as error:
        raise TokenizerUnfit(f"can't be made: {file.name} is not JSON ({error})") from None
    return found if isinstance(found, dict) else {}


# A checkpoint's tokenizer as a class of transformers, for the chat template that came with it.


def chat_tokenizer(folder: Path) -> Any:
    """Returns transformers' tokenizer for a checkpoint, checked before the library reads it. No code that the
    checkpoint brings is run, and the library does not ask whether to run it. Raises TokenizerUnfit, OSError, or an
    error of the library."""
    from transformers import AutoTokenizer

    if (body := made(folder)) is not None:
        with TemporaryDirectory() as beside:
            _put_beside(folder, Path(beside), body)
            return chat_tokenizer(Path(beside))
    check_tokenizer_in(folder)
    return locked(lambda: AutoTokenizer.from_pretrained(str(folder), **_OFFLINE))


def _put_beside(folder: Path, beside: Path, body: str) -> None:
    """Writes the made tokenizer with its config and chat template into the folder `beside`; the config loses the
    entries that name a class for the original files."""
    config = parse(bounded(folder / CONFIG, MOST_BYTES), finite=False) if (folder / CONFIG).is_file() else {}
    kept = {name: value for name, value in config.items() if name not in ("auto_map", "tokenizer_class")}
    (beside / CONFIG).write_text(json.dumps({**kept, "tokenizer_class": "PreTrainedTokenizerFast"}))
    (beside / TOKENIZER).write_text(body)
    for name in ("chat_template.jinja", "special_tokens_map.json"):
        if (folder / name).is_file():
            (beside / name).write_bytes(bounded(folder / name, MOST_BYTES))


def check_tokenizer_in(folder: Path) -> None:
    """Checks the tokenizer.json in a folder in the same way, if there is one. Raises TokenizerUnfit or OSError."""
    path = folder / TOKENIZER
    if path.is_file():
        nbytes, most = path.stat().st_size, bound_of(TOKENIZER).most_bytes
        if nbytes > most:
            raise TokenizerUnfit(f"has {nbytes:,} bytes, none is larger than {most:,}")
        check_tokenizer(path.read_bytes())
