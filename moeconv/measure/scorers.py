"""Scores of the model on trial, sample by sample: by the text that it generates, or by the likelihood of given text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from torch import Tensor, nn

from moeconv.calibration import Sample
from moeconv.errors import CalibrationError, SettingsError
from moeconv.measure.metrics import F64, Metric, likeliest
from moeconv.source.archs import Family
from moeconv.source.experts import Call, ExpertCalls, linear
from moeconv.strict_json import bounded
from moert.pack.fence import Broken, Unfinished, fenced, locked
from moert.pack.model_spec import LayerKey, ModelSpec, StackName
from moert.pack.tensors import TOKENIZER, bound_of
from moert.pack.text import Growth, TokenizerUnfit, check_tokenizer


@dataclass(frozen=True)
class Scores:
    """Scores of n samples: `scores` [n, columns] are the metric's columns. `nats` [n] is the negative log-likelihood of
    each sample's text and `kls` [n] the divergence from the unquantized model's distributions, both summed over its
    `tokens` [n]. `outputs` are the generated texts, if the metric generates."""

    scores: F64
    nats: F64
    tokens: F64
    kls: F64
    outputs: tuple[str, ...] = field(default=())

    @property
    def nll(self) -> float:
        """The mean negative log-likelihood, in nats a token."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def kl(self) -> float:
        """The mean divergence, in nats a token."""
        return float(self.kls.sum() / self.tokens.sum())


@dataclass(frozen=True)
class Routed:
    """The experts that every layer's router chose for some samples, one after the other.

    `experts`: [tokens, top_k] by (stack, layer), -1 where a token was dropped. `samples` are their places in the list
    of samples (or windows), `lengths` how many tokens each has, by stack.
    """

    experts: Mapping[LayerKey, Tensor]
    samples: Sequence[int]
    lengths: Mapping[StackName, Sequence[int]]


class Layers(Protocol):
    """A decoder that is run layer by layer, each on all of the text: ids [rows, tokens]; real [rows, tokens] is true
    for tokens, false for padding. `what` names the work, for a person."""

    def finals(self, ids: Tensor, real: Tensor, scored: Tensor, what: str) -> Tensor:
        """Returns the final states of the places where `scored` [rows, tokens] holds. [places, d_model]"""
        ...

    def calls_of(self, ids: Tensor, real: Tensor, what: str) -> Iterator[tuple[LayerKey, Call]]:
        """Yields the call of each layer's experts, for all rows together."""
        ...

    def head(self) -> AbstractContextManager[Any]:
        """Gives the decoder's moeconv.measure.scorers.Head for the length of a with block."""
        ...


class Subject(Protocol):
    """A model to score: one on trial, or one out of a pack."""

    @property
    def model(self) -> Any: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def family(self) -> Family: ...

    @property
    def calls(self) -> ExpertCalls: ...

    @property
    def layers(self) -> Layers | None:
        """The runner of a model that goes through memory layer by layer; None for a model in memory."""
        ...

    @property
    def stored_head(self) -> Tensor | None:
        """The head [vocab_size, d_model] of the quantized model; None if it is the reference's head."""
        ...


class Scorer(Protocol):
    """A scorer of the model on trial over a fixed list of samples."""

    @property
    def n_samples(self) -> int: ...

    def score(self, *, as_reference: bool = False) -> Scores:
        """Returns the scores of all samples. `as_reference`: the model is the unquantized one now, and later
        divergences are measured from it."""
        ...

    def refer(self) -> None:
        """Takes the model, which is the unquantized one now, for the one that later divergences are measured from: as
        `score` does, without its scores. Its final states are computed once."""
        ...


# From final hidden states to scores: nats of the right token, divergence from the unquantized model.
# The divergence of the distribution q (of hidden state h) from the reference p is Σ p ln p − Σ p ln q. With the head's
# rows w_v, ln q_v = h·w_v − lse(h), so Σ p ln q = h·m − lse(h) where m = Σ p_v w_v is the mean row under p: it is kept
# for each position in place of a whole distribution, and the divergence costs no more than the nats. The rows are those
# of q, also where its head is another than that of p.

LOGIT_BYTES = 64 << 20  # of logits at once, at most
_CACHED_BYTES, _LEAST_ROWS = 8 << 20, 128  # of logits that stay in a cache; rows for which it pays to read the head


@dataclass(frozen=True)
class ReferenceRows:
    """The figures of the unquantized model that are kept for each scored position: the mean row of the head [rows,
    d_model], and Σ p ln p, less the mean bias [rows]; if logits are bounded, the final state and Σ p ln p."""

    mean_row: Tensor
    negentropy: Tensor

    def __getitem__(self, rows: Tensor) -> ReferenceRows:
        return ReferenceRows(self.mean_row[rows], self.negentropy[rows])


class Head:
    """The model's own output weights, and the scores that follow from final states, normed, `hidden` [rows,
    d_model]."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self.output: nn.Module = model.get_output_embeddings()
        self.weight, self.bias = cast("tuple[Tensor, Tensor | None]", (self.output.weight, self.output.bias))
        self.scale, self.softcap = spec.head.scale, spec.head.softcap
        self._original: Tensor | None = None  # the head of the unquantized model, where logits are bounded
        a_row = 4 * len(self.weight)
        self.chunk = max(16, min(LOGIT_BYTES // a_row, max(_LEAST_ROWS, _CACHED_BYTES // a_row)))

    def reference(self, hidden: Tensor, judged_head: Tensor | None = None) -> ReferenceRows:
        """Returns the figures to keep of the unquantized model. `judged_head` [vocab_size, d_model]: the head of the
        models that will be judged; None if it is this model's own."""
        judged = self.weight if judged_head is None else judged_head
        rows, negentropy = [], []
        if self.softcap is not None:
            self._original = self.weight if judged_head is None else self.weight.clone()
        for part in torch.split(hidden, self.chunk):
            log_p = torch.log_softmax(self._logits(part), dim=1)
            p = log_p.exp()
            rows.append(part if self.softcap is not None else p @ judged)
            mean_bias = 0 if self.bias is None or self.softcap is not None else self.bias
            negentropy.append((p * (log_p - mean_bias)).sum(dim=1))
        return ReferenceRows(torch.cat(rows), torch.cat(negentropy))

    def judge(self, hidden: Tensor, targets: Tensor, reference: ReferenceRows | None) -> tuple[Tensor, Tensor]:
        """Returns the nats of the targets [rows] and the divergence from the reference [rows] (zeros without one)."""
        lse = torch.cat([_lse(self._logits(part)) for part in torch.split(hidden, self.chunk)])
        return self._judged(hidden, targets, reference, lse)

    def best(self, hidden: Tensor) -> Tensor:
        """Returns the likeliest next token. [rows]"""
        return torch.cat([self._logits(part).argmax(dim=1) for part in torch.split(hidden, self.chunk)])

    def judge_with_best(
        self, hidden: Tensor, targets: Tensor, reference: ReferenceRows | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the results of `judge`, the likeliest token [rows], and its lead over the second in logits [rows]."""
        lse, best, lead = [], [], []
        for part in torch.split(hidden, self.chunk):
            logits = self._logits(part)
            top = logits.topk(2, dim=1)
            best.append(top.indices[:, 0])
            lead.append(top.values[:, 0] - top.values[:, 1])
            lse.append(_lse(logits))
        return *self._judged(hidden, targets, reference, torch.cat(lse)), torch.cat(best), torch.cat(lead)

    def _judged(
        self, hidden: Tensor, targets: Tensor, reference: ReferenceRows | None, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        right = (hidden * self.scale * self.weight[targets]).sum(dim=1)
        nats = lse - self._bounded(right if self.bias is None else right + self.bias[targets])
        if reference is None:
            return nats, torch.zeros_like(nats)
        return nats, self._divergence(hidden, reference, lse)

    def divergence(self, hidden: Tensor, reference: ReferenceRows) -> Tensor:
        """Returns the divergence from the reference [rows], through which gradients go back."""
        parts = torch.split(hidden, self.chunk)
        return self._divergence(hidden, reference, torch.cat([self._logits(part).logsumexp(1) for part in parts]))

    def _divergence(self, hidden: Tensor, reference: ReferenceRows, lse: Tensor) -> Tensor:
        if self.softcap is not None:
            return lse + reference.negentropy - self._mean_logits(hidden, reference.mean_row)
        return lse + reference.negentropy - (hidden * self.scale * reference.mean_row).sum(dim=1)

    def _mean_logits(self, hidden: Tensor, original: Tensor) -> Tensor:
        """Returns Σ p_v logit_v [rows] of the states `hidden`, with p of the unquantized model's states `original`,
        both [rows, d_model]."""
        means = []
        for mine, before in zip(torch.split(hidden, self.chunk), torch.split(original, self.chunk), strict=True):
            p = torch.softmax(self._logits(before, self._original), dim=1)
            means.append((p * self._logits(mine)).sum(dim=1))
        return torch.cat(means)

    def _bounded(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Returns the logarithms of all tokens' probabilities [rows, vocab_size], for few rows."""
        return torch.log_softmax(self._logits(hidden), dim=1)

    def _logits(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        hidden = hidden * self.scale
        if weight is None and self.bias is None and type(self.output) is nn.Linear:
            return self._bounded(self.output(hidden))  # so that listeners to the module see its inputs
        logits = linear(hidden, self.weight if weight is None else weight)
        return self._bounded(logits if self.bias is None else logits.add_(self.bias))


def _lse(logits: Tensor) -> Tensor:
    """Returns ln Σ exp [rows] of logits [rows, vocab], which are overwritten: torch.logsumexp would take a second array
    of this size."""
    largest = logits.amax(dim=1, keepdim=True)
    return logits.sub_(largest).exp_().sum(dim=1).log() + largest[:, 0]


# One stack of a loaded model, run from any of its layers on: resuming at a layer boundary is exact.

After = Callable[[int, Tensor], Tensor | None]
"""after(layer, hidden [rows, tokens, d_model]): called with the output of a layer, which it may replace."""


class StackRunner:
    def __init__(self, model: Any, family: Family, stack: StackName) -> None:
        self.family = family
        self.module = family.tower(model, stack)
        self.attribute = family.layer_list
        self.n_layers = len(getattr(self.module, self.attribute))

    def run(
        self, inputs: dict[str, Any], start: int = 0, after: After | None = None, stop: int | None = None
    ) -> Tensor:
        """Returns the final hidden states [rows, tokens, d_model], normed. `inputs` are the stack's own keyword
        arguments: input_ids, or inputs_embeds for hidden states that enter the layer `start`. Layers from `stop` on are
        left out."""
        layers = getattr(self.module, self.attribute)
        hooks = []
        if after is not None:
            hooks = [layers[at].register_forward_hook(_hook(at, after)) for at in range(start, stop or self.n_layers)]
        setattr(self.module, self.attribute, nn.ModuleList(self.family.resumed(layers, start, stop)))
        try:
            with self.family.resuming(self.module) if start else nullcontext():
                hidden: Tensor = self.module(**{"use_cache": False, **inputs}).last_hidden_state
            return hidden
        finally:
            setattr(self.module, self.attribute, layers)
            for hook in hooks:
                hook.remove()


def _hook(layer: int, after: After) -> Any:
    def seen(_: Any, __: Any, output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        replaced = after(layer, hidden)
        if replaced is None:
            return None
        return replaced if isinstance(output, Tensor) else (replaced, *output[1:])

    return seen


# The model's tokenizer, which may come from anyone: checked before it is read, given up if it takes too long.

T = TypeVar("T")
_LEAST_S, _BYTES_PER_S = 60.0, 10_000  # text may take so long, and the second is a hundredth of the usual speed


class Tokenizer:
    """The methods of the library's tokenizer that conversions use; it neither truncates nor pads, whatever its file
    says.

    All but `get_vocab` raise CalibrationError if the tokenizer breaks at a text, makes too many tokens of it or is not
    done in time. Ctrl-C works meanwhile.
    """

    def __init__(self, made: tokenizers.Tokenizer, growth: Growth | None = None) -> None:
        self._made, self._growth = made, growth or Growth()
        made.no_truncation()
        made.no_padding()

    @classmethod
    def read(cls, path: Path, spelled: str | None = None) -> Tokenizer:
        """Returns the tokenizer of a file, or of the text `spelled` in its place. Raises SettingsError."""
        if not path.is_file() and spelled is None:
            raise SettingsError(f"{path} is not there: save the model's fast tokenizer beside it")
        try:
            body = bounded(path, bound_of(TOKENIZER).most_bytes) if spelled is None else spelled.encode()
            growth = check_tokenizer(body)
            return cls(locked(lambda: tokenizers.Tokenizer.from_buffer(body)), growth)
        except TokenizerUnfit as error:
            raise SettingsError(f"{path} can't be used as a tokenizer, it {error}") from None
        except Exception as error:  # the library raises nothing more precise
            raise SettingsError(f"{path} can't be used as a tokenizer ({str(error)[:100]})") from None

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        found: dict[str, int] = self._made.get_vocab(with_added_tokens=with_added_tokens)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Any]:
        sizes = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
        try:
            self._growth.check(max(sizes, default=0))
        except TokenizerUnfit as error:
            raise CalibrationError(f"the model's tokenizer {error}") from None
        work = lambda: self._made.encode_batch(list(texts), add_special_tokens=add_special_tokens)  # noqa: E731
        return self._waited(work, sum(sizes))

    def decode_batch(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        work = lambda: self._made.decode_batch(list(ids), skip_special_tokens=skip_special_tokens)  # noqa: E731
        return self._waited(work, sum(map(len, ids)))

    def _waited(self, work: Callable[[], T], nbytes: int) -> T:
        try:
            return fenced(work, _LEAST_S + nbytes / _BYTES_PER_S)
        except Broken as error:
            raise CalibrationError(
                f"the model's tokenizer fails on the text ({error}): is it the model's own?"
            ) from None
        except Unfinished as error:
            raise CalibrationError(f"the model's tokenizer {error} with the text: is it the model's own?") from None


# Texts whose likelihood is scored, and how samples are judged by them: one for each sample, or one for each choice.

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Items:
    """Texts to score: item i belongs to the sample `owner[i]` and has `tokens[i]` scored tokens and `words[i]` words;
    `right[i]` says whether it is the sample's own text (and not a wrong choice)."""

    owner: I64
    right: npt.NDArray[np.bool_]
    tokens: F64
    words: F64

    def at(self, places: I64) -> Items:
        """Returns the items at these places, in their order."""
        return Items(self.owner[places], self.right[places], self.tokens[places], self.words[places])


def texts_of(samples: Sequence[Sample]) -> tuple[list[str], I64, npt.NDArray[np.bool_]]:
    """Returns the texts to score of each sample, its target or each of its choices; the samples that they belong to;
    and which of them are right."""
    texts, owner, right = [], [], []
    for place, sample in enumerate(samples):
        for at, text in enumerate(sample.choices or (sample.target,)):
            texts.append(text)
            owner.append(place)
            right.append(not sample.choices or at == sample.label)
    return texts, np.array(owner), np.array(right)


def documents_of(samples: Sequence[Sample]) -> I64:
    """Returns the number of each sample's document; a sample without a document is one by itself. [samples]"""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(sample.document or at, len(numbers)) for at, sample in enumerate(samples)])


def tally(
    metric: Metric, items: Items, samples: Sequence[Sample], nats: F64, kls: F64, outputs: Sequence[str] = ()
) -> Scores:
    """Returns the scores of nats and divergences [items], and of generated texts [samples] if the metric reads them."""
    own = items.right
    sample_nats, tokens = nats[own], items.tokens[own]
    if metric.reads == "nats":
        units = items.words[own] if metric.unit == "words" else tokens
        scores = np.stack([sample_nats, units], axis=1)
    elif metric.reads == "choice":
        scores = _choices(metric, items, samples, nats)
    else:
        assert metric.judge is not None
        judged = [metric.judge(text, sample.target) for text, sample in zip(outputs, samples, strict=True)]
        scores = np.array(judged, dtype=np.float64)
    return Scores(scores, sample_nats, tokens, kls[own], tuple(outputs))


def _choices(metric: Metric, items: Items, samples: Sequence[Sample], nats: F64) -> F64:
    assert metric.judge is not None
    starts = np.searchsorted(items.owner, np.arange(len(samples)))
    rows = [
        metric.judge(likeliest(nats[start : start + len(sample.choices)].tolist()), sample.label)
        for start, sample in zip(starts, samples, strict=True)
    ]
    return np.array(rows, dtype=np.float64)
