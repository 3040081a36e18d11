"""A checkpoint's tokenizer as transformers knows it, for the chat template that came with it."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moeconv.slow_tokenizer import CONFIG, MOST_BYTES, made
from moeconv.strict_json import bounded, parse
from moert.pack.fence import locked
from moert.pack.tensors import TOKENIZER
from moert.pack.text import check_tokenizer_in


def chat_tokenizer(folder: Path) -> Any:
    """Checked before the library reads it; no code that the checkpoint brings is run, nor asked about. Raises
    TokenizerUnfit, OSError, or what the library raises."""
    from transformers import AutoTokenizer

    if (body := made(folder)) is not None:
        with TemporaryDirectory() as beside:
            _put_beside(folder, Path(beside), body)
            return chat_tokenizer(Path(beside))
    check_tokenizer_in(folder)
    options = {"local_files_only": True, "trust_remote_code": False}
    return locked(lambda: AutoTokenizer.from_pretrained(str(folder), **options))


def _put_beside(folder: Path, beside: Path, body: str) -> None:
    """Writes what says how the made tokenizer is used, without the class that reads the other files."""
    config = parse(bounded(folder / CONFIG, MOST_BYTES), finite=False) if (folder / CONFIG).is_file() else {}
    kept = {name: value for name, value in config.items() if name not in ("auto_map", "tokenizer_class")}
    (beside / CONFIG).write_text(json.dumps({**kept, "tokenizer_class": "PreTrainedTokenizerFast"}))
    (beside / TOKENIZER).write_text(body)
    for name in ("chat_template.jinja", "special_tokens_map.json"):
        if (folder / name).is_file():
            (beside / name).write_bytes(bounded(folder / name, MOST_BYTES))
