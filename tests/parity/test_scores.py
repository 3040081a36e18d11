"""What moert score says: the loss that transformers has on tiny models of each family, and the perplexity that moeconv
measures of the same text, in windows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from packs import Tiny, open_model
from test_reference_models import heldout_texts, model_folder
from tiny import TINY, VOCAB, transformers_model

from moeconv.calibration import Sample
from moeconv.measure.metrics import METRICS
from moeconv.measure.scoring import GeneratedScorer, TextScorer, load_tokenizer, windows_of
from moeconv.measure.trial import LoadedModel
from moeconv.source.checkpoint import Checkpoint
from moert.engine.scoring import Scorer
from moert.engine.text import Text
from moert.errors import InputInvalid
from moert.kernels.backend import opaque
from moert.pack.reader import Pack
from tests.kept_keys import WideKeys
from tests.open_gate import OpenGate

CONTEXT = 64


def scorer(pack: Pack) -> Scorer:
    return Scorer(open_model(pack, opaque(WideKeys()))[0], Text(pack), OpenGate())


@pytest.mark.parametrize("family", TINY)
def test_log_likelihood_equals_that_of_transformers(family: str, tiny: Tiny) -> None:
    plain = family, next(iter(TINY[family][1]))
    mine, reference = scorer(tiny.pack(*plain)), transformers_model(tiny.source(*plain))
    chance = random.Random(family)
    for length in (2, 17, 40):
        ids, target = ([chance.randrange(2, VOCAB) for _ in range(length)] for _ in range(2))
        with torch.inference_mode():
            if mine._model.spec.encoder is not None:
                start = torch.tensor([[mine._model.spec.tokens.start, *target[:-1]]])
                logits = reference(torch.tensor([ids]), decoder_input_ids=start).logits[0]
                found, wanted = mine.score(ids, target, None), target
            else:
                logits = reference(torch.tensor([ids])).logits[0, :-1]
                found, wanted = mine.score(ids, None, None), ids[1:]
        expected = torch.log_softmax(logits.double(), 1)[range(len(wanted)), wanted]
        told = [each for each in found.logprobs if each is not None]
        np.testing.assert_allclose(told, expected.numpy(), atol=5e-4, rtol=1e-4)
        assert found.log_likelihood == pytest.approx(float(expected.sum()), abs=5e-4 * len(wanted))
        assert found.token_perplexity == pytest.approx(float(torch.exp(-expected.mean())), rel=1e-3)
        assert (found.scored, found.words, found.word_perplexity) == (len(wanted), None, None)


@pytest.mark.parametrize("family", TINY)
def test_embeddings_equal_the_hidden_states_of_transformers(family: str, tiny: Tiny) -> None:
    plain = family, next(iter(TINY[family][1]))
    mine = scorer(tiny.pack(*plain))
    if mine._model.spec.encoder is not None:
        with pytest.raises(InputInvalid, match="reads with an encoder"):
            mine.embeddings([[3, 4]], "mean")
        return
    reference, heads = transformers_model(tiny.source(*plain)), list[torch.Tensor]()
    modules = reference if isinstance(reference, torch.nn.Module) else reference.model
    (head,) = (module for name, module in modules.named_modules() if name.split(".")[-1] == "lm_head")
    head.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0]))
    for length in (1, 17, 300):
        ids = [2 + (7 * at + length) % (VOCAB - 2) for at in range(length)]
        if length > (mine._model.spec.max_positions or length):
            continue
        with torch.inference_mode():
            reference(torch.tensor([ids]))
            hidden = heads[-1][0].double()
        for pooling, pooled in (("mean", hidden.mean(0)), ("last", hidden[-1])):
            (found,) = mine.embeddings([ids], pooling)
            assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)
            np.testing.assert_allclose(found, (pooled / pooled.norm()).numpy(), atol=5e-4)


def test_perplexity_equals_what_moeconv_measures(tiny: Tiny) -> None:
    """In whole windows, and in one that reaches back."""
    source = model_folder("wiki")
    tokenizer = load_tokenizer(source / "tokenizer.json")
    text = heldout_texts("wiki", "text")[0][:3000] + "\n"
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    whole = len(offsets) // CONTEXT
    text = text[: offsets[(whole - 1) * CONTEXT + CONTEXT // 2][1]] + "\n"
    texts = windows_of([Sample(text, document="one")], tokenizer, CONTEXT)
    loaded = LoadedModel(Checkpoint.open(source))
    theirs = {name: TextScorer(loaded, texts, METRICS[name]).score() for name in ("perplexity", "token_perplexity")}
    found = scorer(tiny.reference("wiki")).score(text, None, CONTEXT)
    compare(found, theirs)
    assert found.windows == len(texts.ids) == whole


def test_targets_equal_what_moeconv_measures(tiny: Tiny) -> None:
    source = model_folder("g2p")
    pairs = list(zip(heldout_texts("g2p", "input")[:20], heldout_texts("g2p", "target")[:20], strict=True))
    loaded, tokenizer = LoadedModel(Checkpoint.open(source)), load_tokenizer(source / "tokenizer.json")
    samples = [Sample(*pair) for pair in pairs]
    theirs = {
        name: GeneratedScorer(loaded, samples, tokenizer, METRICS[name], 1).score()
        for name in ("perplexity", "token_perplexity")
    }
    mine = scorer(tiny.reference("g2p"))
    first, *others = (mine.score(text, target, None) for text, target in pairs)
    compare(sum(others, first), theirs)


def compare(found: Any, theirs: dict[str, Any]) -> None:
    words, tokens = (theirs[name].scores.sum(axis=0) for name in ("perplexity", "token_perplexity"))
    assert (found.words, found.scored) == (words[1], tokens[1])
    assert found.log_likelihood == pytest.approx(-tokens[0], rel=1e-5)
    for name, value in (("perplexity", found.word_perplexity), ("token_perplexity", found.token_perplexity)):
        assert value == pytest.approx(float(METRICS[name].value(theirs[name].scores)), rel=1e-4)
