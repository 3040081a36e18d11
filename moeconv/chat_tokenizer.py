"""A checkpoint's tokenizer as transformers knows it, for the chat template that came with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moert.pack.fence import locked
from moert.pack.tokenizer import check_tokenizer_in


def chat_tokenizer(folder: Path) -> Any:
    """Checked before the library reads it; no code that the checkpoint brings is run, nor asked about. Raises
    TokenizerUnfit, OSError, or what the library raises."""
    from transformers import AutoTokenizer

    check_tokenizer_in(folder)
    options = {"local_files_only": True, "trust_remote_code": False}
    return locked(lambda: AutoTokenizer.from_pretrained(str(folder), **options))
