"""Packs whose tokenizers can spell any text: of bytes, of letters with byte tokens, of unigrams; random weights."""

from __future__ import annotations

from pathlib import Path

from tiny_packs import DECODER_SHAPE, EOS, PAD, write_pack
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from moeconv.writer import add_files
from moert.pack.reader import Pack
from moert.pack.text import BYTES, CHAT, ChatFormat, dump_chat

VOCAB = 320
SPEC = DECODER_SHAPE.but(vocab_size=VOCAB, eos=(EOS, 3), max_positions=None).spec
SPECIAL = ["<pad>", "</s>", "<unk>", "<|call|>", "<think>", "</think>"]
_PAIRS = ('{"', '":', '",', "true", "false", "null", "\n\n", "  ", "12", "é", '"}', "abc", "[]", "日")


def byte_level() -> Tokenizer:
    """One token a byte, some pairs, and special tokens first."""
    vocabulary = {name: number for number, name in enumerate(SPECIAL)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    merges = []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for pair in _PAIRS:
        ((letters, _),) = level.pre_tokenize_str(pair)
        for end in range(2, len(letters) + 1):
            if letters[:end] not in vocabulary:
                vocabulary[letters[:end]] = len(vocabulary)
                merges.append((letters[: end - 1], letters[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special(tokenizer)


def byte_fallback() -> Tokenizer:
    """Letters, and a token for each byte, as Llama has them."""
    vocabulary = {name: number for number, name in enumerate([*SPECIAL, *BYTES])}
    for letter in 'abeflnrstu▁{}[]":,0123456789':
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return _with_special(tokenizer)


def unigram() -> Tokenizer:
    """Pieces of words with scores, as T5 has them; there is no byte for a letter that is missing."""
    letters = [chr(code) for code in range(33, 127)] + ["▁", "é", "日"]
    pieces = [*SPECIAL, *letters, '▁"', '":', "▁true", "true", "▁12"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(number)) for number, piece in enumerate(pieces)], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_special(tokenizer)


def words() -> Tokenizer:
    """WordPiece, whose text is not the text of its tokens."""
    tokenizer = Tokenizer(
        models.WordPiece({**{name: at for at, name in enumerate(SPECIAL)}, "a": 6}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.decoder = decoders.WordPiece()
    return _with_special(tokenizer)


TOKENIZERS = {"bytes": byte_level, "fallback": byte_fallback, "unigram": unigram}


def _with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer


def write_grammar_pack(out: Path, tokenizer: Tokenizer, template: str | None = None, eos: tuple[int, ...] | None = None,
                       ) -> Path:  # fmt: skip
    """`template`: of chats, which end with the first end token."""
    spec = SPEC if eos is None else DECODER_SHAPE.but(vocab_size=VOCAB, eos=eos, max_positions=None).spec
    write_pack(out, spec, paths=False, tokenizer=False)
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    if template is not None:
        files[CHAT] = dump_chat(ChatFormat(template, {"eos_token": SPECIAL[EOS], "pad_token": SPECIAL[PAD]}))
    add_files(out, Pack.open(out).manifest, files)
    return out
