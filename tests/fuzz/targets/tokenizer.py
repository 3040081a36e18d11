"""tokenizer.json: loaded, and used as a run does, on a prompt that strains it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from moert.engine.text import TOKENIZER, Text
from moert.errors import RunError
from moert.pack.errors import PackError
from tests.fuzz.target import Target

_MODEL = SimpleNamespace(longest_prompt=4096)
_PROMPTS = ("", "abc é\u0301 \U0001f600\n", "x" * 34)


class _Pack(SimpleNamespace):
    """As much of a pack as Text asks for."""

    def read_file(self, relative: str) -> bytes:
        body: bytes = self.body
        return body


def read(body: bytes) -> None:
    files = {TOKENIZER: SimpleNamespace(nbytes=len(body))}
    pack: Any = _Pack(body=body, root=Path("model.pack"), manifest=SimpleNamespace(files=files, model=_MODEL))
    text = Text(pack)
    ids = [number for prompt in _PROMPTS for number in text.encode(prompt)]
    detokenizer = text.detokenizer()
    for number in (*ids[:40], 0, 1, 2):
        detokenizer.push(number)
    detokenizer.flush()
    text.detokenizer_with(["<think>"])


def _letters() -> dict[str, int]:
    return {letter: number for number, letter in enumerate(["<unk>", "</s>", *"abcdefx▁"])}


def seeds() -> list[bytes]:
    """One of each kind of model, and what stands before and behind it in published ones."""
    bpe = Tokenizer(models.BPE({**_letters(), "ab": 10, "abc": 11}, [("a", "b"), ("ab", "c")], unk_token="<unk>"))
    bpe.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁"), normalizers.Prepend("▁")])
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                     decoders.Strip(" ", 1, 0)])  # fmt: skip
    bpe.add_special_tokens(["<unk>", "</s>"])
    split = Tokenizer(models.WordLevel(_letters(), "<unk>"))
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"(?i:'s|'t)|\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])  # fmt: skip
    split.decoder = decoders.ByteLevel()
    split.post_processor = processors.TemplateProcessing("$A </s>", "$A $B </s>", [("</s>", 1)])
    unigram = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("ab", -2.5)], 0, byte_fallback=False)
    )
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    unigram.enable_truncation(4)
    unigram.enable_padding(length=3)
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]", max_input_chars_per_word=9))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece()
    made = (bpe, split, unigram, pieces)
    return [json.dumps(json.loads(each.to_str()), separators=(",", ":"), ensure_ascii=False).encode() for each in made]


TARGET = Target(read, (PackError, RunError), seeds)
