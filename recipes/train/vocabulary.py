"""Tokenizers of the reference models, made from the training split only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """Rows of a JSONL file."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def letters_and_phonemes(rows: Iterable[dict[str, str]]) -> Tokenizer:
    """One token a letter and one a phoneme; ids 0–2 are pad, end and unknown. Encoding appends the end token."""
    letters, phonemes = set(), set()
    for row in rows:
        letters.update(row["input"])
        phonemes.update(row["target"].split())
    words = [PAD, EOS, UNKNOWN, *sorted(letters), *sorted(phonemes)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("[a-z]"), behavior="isolated")]
    )
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    end_with_eos(tokenizer)
    return tokenizer


def byte_pairs(texts: Iterable[str], size: int, eos: bool) -> Tokenizer:
    """Byte-level BPE of ``size`` tokens; ids 0 and 1 are pad and end. Encoding appends the end token if ``eos``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if eos:
        end_with_eos(tokenizer)
    return tokenizer


def end_with_eos(tokenizer: Tokenizer) -> None:
    """Make encoding append the end token."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B:1 {EOS}:1", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )


def save(tokenizer: Tokenizer, folder: Path, limit: int, truncate: bool) -> None:
    """Write tokenizer.json and tokenizer_config.json; ``limit`` is the longest input in tokens.

    With ``truncate``, tokenizer.json says that longer inputs are cut there (the end token stays).
    """
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    if truncate:
        tokenizer.enable_truncation(limit)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "model_max_length": limit,
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
    }
    if tokenizer.token_to_id(UNKNOWN) is not None:
        config["unk_token"] = UNKNOWN
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
