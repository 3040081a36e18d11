"""Five papers beside this project, a table each: mechanisms and figures, with those of ours from kept results.

A claim is plain data. Its flags, commands and files stand in backquotes, so that a test finds each of them; `out` is a
template of rows of one result (recipes/bench/blocks.py). Figures of a paper are from its own text; where that could not
be checked, the cell has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from recipes.bench.tables import Line

HEAD = ("mechanism or figure", "the paper reports", "ours", "found here", "differs in")
NOT_BUILT, NO_BENCH, NOT_MEASURED = "not built", "no bench", "not measured"


class Claim(NamedTuple):
    """A mechanism or figure of a paper. `ours`: flags and bench; `out` and `differs`: templates of rows of `result`."""

    mechanism: str
    reported: str
    ours: str
    out: str
    differs: str = ""
    result: str = ""

    @property
    def line(self) -> Line:
        """Returns the line of the table, whose cells are templates."""
        linked = f"; [{self.result}](results/{self.result}.json)" if self.result else ""
        return self.mechanism, self.reported, self.ours + linked, self.out, self.differs


SHAPED = "OLMoE's shape with 6 layers and random weights; imitated drives"
SMALL = "small models that were trained here"
SIMULATED = "cards are simulated; routing of the wiki model"
LOGGED = "counted once, in [the log](../recipes/LOG.md)"


# Templates of `make bench-edgemoe` that repeat themselves.


def _pack(model: str, plan: str, runs: str) -> str:
    """Returns the templates of a pack's size, loss and speed."""
    size, loss = f"{{{model}, {plan}: experts|.2f}} MB", f"{{{model}, {plan}: loss|.1f}}%"
    return f"{size}, {loss}, {{{model}, ssd: {runs} 50%: decode|.0f}}"


def tab_2(model: str) -> str:
    """Returns the templates of our pack and of those beside it."""
    sides = (("ours", "ours"), ("STI-like", "STI-like"), ("INT4", "INT4, LRU"), ("INT2", "INT2, LRU"))
    return "; ".join(f"{_pack(model, plan, runs)} ({plan})" for plan, runs in sides)


def fig_12(name: str) -> str:
    """Returns the templates of the times of samples."""
    where = f"wiki, samples, ssd: {name}"
    return f"{{{where}: median@value|.0f}} and {{{where}: 95th percentile|.0f}}"


def fig_14(device: str) -> str:
    """Returns the templates of our speed beside INT2's at three sizes of the cache."""
    return ", ".join(f"{{wiki, caches, {device}: ours {s}% to INT2, LRU {s}%|.2f}}" for s in (25, 50, 75))


def fig_15(name: str) -> str:
    """Returns the templates of the pack of a target."""
    return _pack("wiki", name, name)


EDGEMOE = (
    Claim(
        "experts on the drive, all else in memory",
        "significant memory savings and speedup",
        "`--memory`, `make bench-stream`",
        "at 500 MB/s, half of the experts in memory: {olmoe-shaped, ssd: moert 50% to IO-FREE: memory of the "
        "process|.1f} times less memory than with everything at 16 bits in memory, at "
        "{olmoe-shaped, ssd: moert 50% to IO-FREE: speed|%} of its speed",
        SHAPED, "stream",
    ),
    Claim(
        "speed beside IO-EXP, IO-QEXP and STI (§4)",
        "",
        "`make bench-stream`",
        "at 500 MB/s, half of the experts in memory: {olmoe-shaped, ssd: moert 50% to IO-EXP|.1f}, "
        "{olmoe-shaped, ssd: moert 50% to IO-QEXP|.1f} and {olmoe-shaped, ssd: moert 50% to STI-like|.1f} times their "
        "speed; wiki, with small experts: {wiki, ssd: moert 50% to IO-EXP|.1f}, {wiki, ssd: moert 50% to IO-QEXP|.1f} "
        "and {wiki, ssd: moert 50% to STI-like|.1f}",
        "baselines are settings of this engine; a server's processor and imitated drives in place of edge devices",
        "stream",
    ),
    Claim(
        "bits of each expert by its sensitivity (§3.2)",
        "smaller experts with tolerable loss",
        "`--loss`, `make demo`",
        "asked for {wiki: target}%: wiki's experts take {wiki: expert bytes of FP16|%} of 16 bits and lose "
        "{wiki: held-out loss|.1f}%; g2p's {g2p: expert bytes of FP16|%} and {g2p: held-out loss|.1f}%",
        "trellis codes, divergence, a knapsack and a bound of the loss in place of the paper's choices", "demo",
    ),
    Claim(
        "the paper's own algorithm: channels, metric, greedy",
        "",
        "`--quantizer channel`, `--tune signal=metric`, `--tune allocation=greedy`, `make bench-edgemoe`",
        "asked for {g2p: target}%, experts and held-out loss: {g2p, paper's: experts|.2f} MB and "
        "{g2p, paper's: loss|.1f}% (g2p), {wiki, paper's: experts|.2f} MB and {wiki, paper's: loss|.1f}% (wiki); our "
        "default {g2p, ours: experts|.2f} MB and {g2p, ours: loss|.1f}%, {wiki, ours: experts|.2f} MB and "
        "{wiki, ours: loss|.1f}%, and {g2p, ssd: ours 50% to paper's 50%|.2f} and "
        "{wiki, ssd: ours 50% to paper's 50%|.2f} times its speed at 500 MB/s in equal room",
        "[the options together](method.md#the-papers-own-algorithm): the loss measured on calibration text must meet "
        "the target, and not a bound of it",
        "edgemoe",
    ),
    Claim(
        "one expert at INT2, all others at INT4 (Fig. 7a)",
        "",
        "`make bench-sweep`",
        "exact in {wiki: wall time|%} of the time of full evaluations. The paper's metric ranks experts differently on "
        "other samples: rank correlation {g2p: metric on other samples|.2f} (g2p) and "
        "{wiki: metric on other samples|.2f} (wiki); divergence {g2p: kl on other samples|.2f} and "
        "{wiki: kl on other samples|.2f}",
        SMALL, "sweep",
    ),
    Claim(
        "is the ranking worth its price?",
        "",
        "`make bench-plans`",
        "wiki at 2.4 bits a weight loses {wiki, 2.4 bits, sweep: loss|.1f}% by the sweep, "
        "{wiki, 2.4 bits, usage: loss|.1f}% by usage, {wiki, 2.4 bits, random: loss|.1f}% at random; g2p "
        "{g2p, 2.4 bits, sweep: loss|.2f}, {g2p, 2.4 bits, usage: loss|.2f} and {g2p, 2.4 bits, random: loss|.2f}%: "
        "little between them",
        "all plans have equal bytes", "plans",
    ),
    Claim(
        "sizes and losses beside INT4 and STI (Tab. 2)",
        "",
        "`make bench-edgemoe`",
        "experts, held-out loss, tokens/s at 500 MB/s. g2p: "
        f"{tab_2('g2p')}. Wiki: {tab_2('wiki')}",
        "each in as much room as half of our experts take; INT4 and INT2 by channel under LRU; STI-like: half of the "
        "experts at 4 bits and half at 2 by STI's ranking, those that were read first stay",
        "edgemoe",
    ),
    Claim(
        "few paths carry most tokens (Fig. 4)",
        "over 99% of tokens on the 20% most frequent paths",
        "`moeconv profile-paths`, `make report`",
        "not so here: {wiki: decoder top20_share|%} (wiki), {g2p: encoder top20_share|%} and "
        "{g2p: decoder top20_share|%} (g2p's encoder and decoder)",
        SMALL, "models",
    ),
    Claim(
        "the next expert guessed, two layers known (Fig. 8)",
        "87%",
        "`--tune predict=transitions`, `make report`",
        "not so here: {wiki: decoder next_given_2|%} (wiki), {g2p: encoder next_given_2|%} and "
        "{g2p: decoder next_given_2|%} (g2p); the next layer's router, run early, knows more",
        SMALL, "models",
    ),
    Claim(
        "reading ahead in the pipeline (Fig. 16)",
        "speedup",
        "`make bench-stream`",
        "nothing won: tokens/s on demand and with reading ahead {olmoe-shaped, ssd: mixed bits, on demand: decode} and "
        "{olmoe-shaped, ssd: mixed bits, + preload: decode} at 500 MB/s, {wiki, ssd: mixed bits, on demand: decode} "
        "and {wiki, ssd: mixed bits, + preload: decode} on wiki; with a cache for half of the experts "
        "{olmoe-shaped, ssd: moert 50%: decode} and {wiki, ssd: moert 50%: decode}",
        "named by the next layer's router, and read only if that saves time",
        "stream",
    ),
    Claim(
        "reading ahead in equal room",
        "",
        "`--tune predict=gate`, `--tune predict=none`, `make bench-ahead`",
        "half of the experts in memory: {olmoe-shaped, ssd: gate 50% to none|.2f} of the speed without at 500 MB/s, "
        "{olmoe-shaped, nvme: gate 50% to none|.2f} unthrottled",
        SHAPED, "ahead",
    ),
    Claim(
        "large experts read ahead by path tables (Fig. 16)",
        "speedup",
        "`--tune predict=transitions`, `make bench-edgemoe`",
        "half of the experts in memory, times the speed without, by path tables and by the next layer's router: "
        "{olmoe-shaped, ssd: transitions 50% to none 50%|.2f} and {olmoe-shaped, ssd: gate 50% to none 50%|.2f} at 500 "
        "MB/s, {olmoe-shaped, nvme: transitions 50% to none 50%|.2f} and "
        "{olmoe-shaped, nvme: gate 50% to none 50%|.2f} unthrottled; the smallest expert has "
        "{olmoe-shaped: smallest expert|.1f} MB",
        f"{SHAPED}; routing of the wiki model; read only if that saves time",
        "edgemoe",
    ),
    Claim(
        "eviction by frequency and distance (§3.3.3, Fig. 13)",
        "",
        "`--tune eviction=paper`, `make demo`",
        "hits with a quarter in memory, wiki: {wiki, 25%: hit rate, paper|%} beside "
        "{wiki, 25%: hit rate, lru|%} (lru), {wiki, 25%: hit rate, lfu|%} (lfu), "
        "{wiki, 25%: hit rate, auto|%} (our default) and {wiki, 25%: hit rate, knowing the future|%} (knowing the "
        "future); g2p: {g2p, 25%: hit rate, paper|%} beside {g2p, 25%: hit rate, auto|%} (our default)",
        "the published formula has the sign of its rule the wrong way round; the rule is followed", "demo",
    ),
    Claim(
        "first in, first out; last in, first out",
        "",
        "`recipes/bench/controls.py`",
        "never paid, and were removed as options; the baselines of benches still have them",
        LOGGED,
    ),
    Claim(
        "expert buffer filled before the first token",
        "",
        "`--tune fill=used`, `make bench-fill`",
        "time to the first token after a second of waiting, beside that of an empty cache, half of the experts in "
        "memory: {wiki, ssd, 50%: first token, filled to empty|.2f} (wiki), "
        "{g2p, ssd, 50%: first token, filled to empty|.2f} (g2p); with a prompt at once it lost: "
        "{wiki, ssd, 50%: at once, from opening to the end: filled to empty|.2f} and "
        "{g2p, ssd, 50%: at once, from opening to the end: filled to empty|.2f} times the time to the end",
        "by default in `moert serve`, and in `moert chat` at a terminal, where the first request ends it; the first "
        "pass of such small models reads too little for an imitated drive to slow it down", "fill",
    ),
    Claim(
        "times of samples beside the baselines (Fig. 12)",
        "",
        "`make bench-edgemoe`, `python -m recipes.bench.sweeps`",
        "wiki at 500 MB/s, half of the experts in memory, median and 95th percentile in ms: ours "
        f"{fig_12('ours 50%')}, IO-EXP {fig_12('IO-EXP')}, IO-QEXP {fig_12('IO-QEXP')}, "
        f"STI-like {fig_12('STI-like 50%')}",
        f"{SMALL}; baselines are settings of this engine; a sample is a short prompt and 32 tokens",
        "edgemoe",
    ),
    Claim(
        "cache sizes, with uniform INT2 beside (Fig. 14)",
        "",
        "`make bench-ahead`",
        "times the speed of INT2 under LRU, with a quarter, half and three quarters of the experts in memory: "
        "{olmoe-shaped, ssd: gate 25% to INT2, LRU|.2f}, {olmoe-shaped, ssd: gate 50% to INT2, LRU|.2f}, "
        "{olmoe-shaped, ssd: gate 75% to INT2, LRU|.2f} at 500 MB/s; unthrottled INT2 is faster: "
        "{olmoe-shaped, nvme: gate 25% to INT2, LRU|.2f}, {olmoe-shaped, nvme: gate 50% to INT2, LRU|.2f}, "
        "{olmoe-shaped, nvme: gate 75% to INT2, LRU|.2f}",
        SHAPED, "ahead",
    ),
    Claim(
        "the same on a trained model (Fig. 14)",
        "",
        "`make bench-edgemoe`",
        "mostly lost, to a pack that loses {wiki, INT2: loss|.1f}%: wiki, times the speed of INT2 under LRU, with a "
        "quarter, half and three quarters of the experts in memory: "
        f"{fig_14('ssd')} at 500 MB/s, {fig_14('nvme')} unthrottled",
        SMALL, "edgemoe",
    ),
    Claim(
        "targets of 5, 10, 15 and 20% (Fig. 15)",
        "",
        "`make bench-edgemoe`, `python -m recipes.bench.sweeps`",
        "wiki: experts, held-out loss, tokens/s at 500 MB/s: "
        f"{fig_15('ours')} ({{wiki: target}}%); {fig_15('target of 10%')} (10%); {fig_15('target of 15%')} (15%); "
        f"{fig_15('target of 20%')} (20%)",
        f"{SMALL}; room for half of the experts of the first in all runs",
        "edgemoe",
    ),
)  # fmt: skip

SIDA = (
    Claim(
        "the hash function: LSTM, SparseMax, truncated distillation (§3)",
        "",
        "`moeconv train-hash`, `make bench-hash`",
        "takes {g2p: hash function, of the pack|.1f}% of g2p's pack, {marks: hash function, of the pack|.1f}% of "
        "marks's, {wiki: hash function, of the pack|.1f}% of wiki's",
        "a decoder's network reads only forward; another rate and batch", "hashed",
    ),
    Claim(
        "choices among those named first (Tab. 4)",
        "",
        "`make bench-hash`",
        "short inputs, one named and three: {g2p, encoder, short: among the first|%} and "
        "{g2p, encoder, short: among the first 3|%} (g2p's encoder), {marks, encoder, short: among the first|%} and "
        "{marks, encoder, short: among the first 3|%} (marks's encoder)",
        SMALL, "hashed",
    ),
    Claim(
        "recall before the first layer, of an encoder",
        "",
        "`make bench-hash`",
        "of a pass's demands, with as many named and twice as many: "
        "{g2p, encoder, before the first layer: hash, 1 × as many|%} and "
        "{g2p, encoder, before the first layer: hash, 2 × as many|%} (g2p), "
        "{marks, encoder, before the first layer: hash, 1 × as many|%} and "
        "{marks, encoder, before the first layer: hash, 2 × as many|%} (marks)",
        SMALL, "hashed",
    ),
    Claim(
        "routers left out: performance kept (Tab. 3)",
        "down to 1% performance drop",
        "`--tune routing=hash`, `make bench-hash`",
        "kept: {g2p: kept|.1%} (g2p, ROUGE-2), {marks: kept|.1%} (marks, F1), {wiki: kept|.1%} (wiki, perplexity)",
        f"{SMALL}; routers without softmax cannot be left out", "hashed",
    ),
    Claim(
        "a promised loss with the routers left out",
        "",
        "`--tune route=hash`",
        "the function takes most of the loss, and leaves little to the bits; no result is kept",
        LOGGED,
    ),
    Claim(
        "three experts of the function as routing (top-3)",
        "for longer texts",
        "`make bench-sida`",
        "won on marks, lost on g2p: performance kept with one and three {g2p: kept with 1 of the function|.1%} and "
        "{g2p: kept with 3 of the function|.1%} (g2p, ROUGE-2), {marks: kept with 1 of the function|.1%} and "
        "{marks: kept with 3 of the function|.1%} (marks, F1)",
        f"{SMALL}; for three times the reading, so only the bench does it; another pack of marks than above", "sida",
    ),
    Claim(
        "time of choosing experts (Fig. 3)",
        "",
        "`make bench-hash`",
        "lost: routers take {g2p: choosing experts, with routers|%} of a pass and the function "
        "{g2p: choosing experts, with hash|%} (g2p), {wiki: choosing experts, with routers|%} and "
        "{wiki: choosing experts, with hash|%} (wiki)",
        "the network is as large as layers of such small models", "hashed",
    ),
    Claim(
        "memory of experts that an input does not need (Fig. 8)",
        "up to 80% of GPU memory saved",
        "`make bench-hash`",
        "short inputs: {g2p, short: expert memory that is not needed|%} (g2p), "
        "{marks, short: expert memory that is not needed|%} (marks), "
        "{wiki, short: expert memory that is not needed|%} (wiki). With 80% saved the speed falls to "
        "{g2p, short: speed with 80% of expert memory saved|.2f}, "
        "{marks, short: speed with 80% of expert memory saved|.2f} and "
        "{wiki, short: speed with 80% of expert memory saved|.2f} of that with all in memory",
        "memory and drive in place of GPU and memory", "hashed",
    ),
    Claim(
        "throughput and latency (Fig. 9 and 11)",
        "up to 3.93 times the throughput, up to 72% less latency",
        "`--tune predict=hash`, `make bench-hash`",
        "half of the experts in memory, 500 MB/s, tokens/s: nothing read ahead, reading ahead by the function, and "
        "eviction by it too: {g2p, ssd: none 50%: decode}, {g2p, ssd: hash 50%: decode} and "
        "{g2p, ssd: hash, foreseen 50%: decode} (g2p), {marks, ssd: none 50%: decode}, {marks, ssd: hash 50%: decode} "
        "and {marks, ssd: hash, foreseen 50%: decode} (marks), {wiki, ssd: none 50%: decode}, "
        "{wiki, ssd: hash 50%: decode} and {wiki, ssd: hash, foreseen 50%: decode} (wiki). Reading ahead won a "
        "little at most, eviction lost",
        "experts so small that naming them takes as long as reading them; routers stay in place", "hashed",
    ),
    Claim(
        "eviction of experts that the batch does not need",
        "",
        "removed; `recipes/bench/controls.py`",
        "of the hits that our default lacks, with half in memory: {g2p, 50%: won by foreseen|.1f}% won (g2p), "
        "{wiki, 50%: won by foreseen|.1f}% (wiki), {marks, 50%: won by foreseen|.1f}% (marks): it never paid",
        "without the function's errors it is no better", "hashed",
    ),
    Claim(
        "a thread that prepares the next batch (§3.1)",
        "",
        "`--input`, `--batch`, `make bench-beforehand`",
        "times the speed without: "
        "{g2p: batches of 8, the next one worked out beforehand, with hash|.2f} (g2p), "
        "{wiki: batches of 8, the next one worked out beforehand, with hash|.2f} (wiki): nothing won",
        "works only in time that the others leave", "beforehand",
    ),
    Claim(
        "the paper's set-up as a whole: routers out, reading by the function, first in first out",
        "",
        "`--tune routing=hash`, `--tune predict=hash`, `recipes/bench/controls.py`, `make bench-sida`",
        "lost: half of the experts in memory, 500 MB/s, short and long inputs: "
        "{g2p, short: as a whole to on demand|.2f} and {g2p, long: as a whole to on demand|.2f} (g2p), "
        "{marks, short: as a whole to on demand|.2f} and {marks, long: as a whole to on demand|.2f} (marks) times the "
        "throughput of our default without the function. Without the function its memory has room for more experts, "
        "{g2p: room for experts in equal memory|%} and {marks: room for experts in equal memory|%} in all: "
        "{g2p, short: as a whole to in equal memory|.2f}, {g2p, long: as a whole to in equal memory|.2f}, "
        "{marks, short: as a whole to in equal memory|.2f} and {marks, long: as a whole to in equal memory|.2f} times "
        "that throughput. Latency as a whole, on demand, in equal memory: {g2p, long: as a whole: latency}, "
        "{g2p, long: on demand: latency} and {g2p, long: in equal memory: latency} ms (g2p, long), "
        "{marks, long: as a whole: latency}, {marks, long: on demand: latency} and "
        "{marks, long: in equal memory: latency} ms (marks, long)",
        "one input at a time; memory and drive in place of GPU and memory; answers differ, and so may their lengths",
        "sida",
    ),
    Claim(
        "idle experts by the length of an input (Fig. 4)",
        "over 70 and 80% idle with 80 tokens (Switch-base-128 and 256)",
        "`python -m recipes.bench.sweeps`, `make bench-sida`",
        "of a layer's experts in the encoder: {g2p, encoder, 4 tokens: idle experts|%} with 4 tokens and "
        "{g2p, encoder, 8 tokens: idle experts|%} with 8 (g2p), {marks, encoder, 16 tokens: idle experts|%} with 16 "
        "and {marks, encoder, 64 tokens: idle experts|%} with 64 (marks)",
        "16 experts a layer (g2p) and 64 (marks)", "sida",
    ),
    Claim(
        "dependence on other tokens (Fig. 7)",
        "most others have no impact",
        "`python -m recipes.bench.sweeps`, `make bench-sida`",
        "choices of the encoder that change if 10, 30 and 50% of the other tokens do: "
        "{g2p, 10% of the tokens changed: choices that change|%}, "
        "{g2p, 30% of the tokens changed: choices that change|%}, "
        "{g2p, 50% of the tokens changed: choices that change|%} (g2p), "
        "{marks, 10% of the tokens changed: choices that change|%}, "
        "{marks, 30% of the tokens changed: choices that change|%}, "
        "{marks, 50% of the tokens changed: choices that change|%} (marks); if half of them change places: "
        "{g2p, 50% of the positions changed: choices that change|%} and "
        "{marks, 50% of the positions changed: choices that change|%}",
        "long inputs, whose lengths differ; mean over layers; special tokens stay", "sida",
    ),
    Claim(
        "the number c of critical tokens (Eq. 2)",
        "1 to 4",
        "`make bench-sida`",
        "by 10, 30 and 50% of the tokens changed: {g2p, 10% of the tokens changed: critical tokens|.1f}, "
        "{g2p, 30% of the tokens changed: critical tokens|.1f}, {g2p, 50% of the tokens changed: critical tokens|.1f} "
        "(g2p), {marks, 10% of the tokens changed: critical tokens|.1f}, "
        "{marks, 30% of the tokens changed: critical tokens|.1f}, "
        "{marks, 50% of the tokens changed: critical tokens|.1f} (marks)",
        "solved for the mean over inputs, layers and positions, so that c need not be whole; inputs are shorter than "
        "the paper's 512 tokens",
        "sida",
    ),
    Claim(
        "experts' share of the weights (Tab. 2)",
        "78% (Switch-base-8) to 99% (Switch-base-256)",
        "`make bench-sida`",
        "{g2p: experts, of all weights|%} (g2p), {marks: experts, of all weights|%} (marks), "
        "{wiki: experts, of all weights|%} (wiki); of the bytes of their packs {g2p: experts, of the pack|%}, "
        "{marks: experts, of the pack|%} and {wiki: experts, of the pack|%}",
        SMALL, "sida",
    ),
    Claim(
        "expert memory that an input uses (Fig. 2)",
        "down to 5% of large models",
        "`make bench-sida`",
        "short, middle and long inputs: {g2p, short: expert memory that an input uses|%}, "
        "{g2p, middle: expert memory that an input uses|%}, {g2p, long: expert memory that an input uses|%} (g2p), "
        "{marks, short: expert memory that an input uses|%}, {marks, middle: expert memory that an input uses|%}, "
        "{marks, long: expert memory that an input uses|%} (marks)",
        "of the experts alone, answers included; 16 and 64 experts a layer", "sida",
    ),
)  # fmt: skip

MIXTRAL_OFFLOADING = (
    Claim(
        "mixed quantization (Tab. 1)",
        "attention at 4 bits, experts at 2 or 3",
        "`--dense-bits attention=4`, `--bits 2`, `make bench-mixed`",
        "perplexity rises by {wiki, attention at 4, experts at 3: loss|.1f}% (wiki) and "
        "{wikids, attention at 4, experts at 3: loss|.1f}% (wikids) with experts at 3 bits, by "
        "{wiki, attention at 4, experts at 2: loss|.1f}% and {wikids, attention at 4, experts at 2: loss|.1f}% at 2",
        f"{SMALL}; experts coded by GPTQ, not HQQ", "mixed",
    ),
    Claim(
        "the k latest experts of each layer (its figure of hits)",
        "",
        "`--tune eviction=layer-lru`, `make bench-hash`",
        "hits on wiki, room for 4, 8 and 16 of 32: {wiki, k = 4: hits under layer-lru|%}, "
        "{wiki, k = 8: hits under layer-lru|%}, {wiki, k = 16: hits under layer-lru|%}; the latest of all layers in "
        "equal room: {wiki, k = 4: hits under lru|%}, {wiki, k = 8: hits under lru|%}, "
        "{wiki, k = 16: hits under lru|%}",
        "4 of 32 experts a token in place of 2 of 8", "hashed",
    ),
    Claim(
        "the next layers' routers run early (its figure of recall)",
        "",
        "`--tune predict=gate`, `make bench-hash`",
        "recall on wiki, as many named and twice as many: {wiki, decoder, 1 ahead: gate, 1 × as many|%} and "
        "{wiki, decoder, 1 ahead: gate, 2 × as many|%} one layer ahead, {wiki, decoder, 2 ahead: gate, 1 × as many|%} "
        "and {wiki, decoder, 2 ahead: gate, 2 × as many|%} two",
        "no model has ten layers to look over", "hashed",
    ),
    Claim(
        "tokens/s on T4, RTX 3060, RTX 3080 Mobile, A100 (Tab. 2)",
        "2 to 4 tokens/s with experts at 2 or 3 bits",
        "`--device sim:t4`, `make bench-devices`",
        "experts at 3 bits, this method and ours: {t4, experts at 3 bits: their method} and "
        "{t4, experts at 3 bits: two devices} (T4), {rtx3060, experts at 3 bits: their method} and "
        "{rtx3060, experts at 3 bits: two devices} (RTX 3060), {rtx3080-mobile, experts at 3 bits: their method} and "
        "{rtx3080-mobile, experts at 3 bits: two devices} (RTX 3080 Mobile), "
        "{a100, experts at 3 bits: their method} and {a100, experts at 3 bits: two devices} (A100)",
        f"{SIMULATED}: far faster than the paper's program, so only the ratios say something", "devices",
    ),
    Claim(
        "the method on a real card",
        "",
        "`--tune device-keep=lru`, `--tune device-experts=copied`, `make check-gpu`",
        "lost: one request {one request: LRU offloading} tokens/s, all on the processor "
        "{one request: all on the processor}",
        "an H200 beside 16 cores; OLMoE's shape with 4 layers at 4 bits", "card",
    ),
    Claim(
        "ablation: reading ahead, cache, naive",
        "",
        "`--tune predict=none`, `make bench-hash`",
        "wiki at 500 MB/s, tokens/s: everything {wiki, ssd: auto 50%: decode}, without reading ahead "
        "{wiki, ssd: none 50%: decode}, without the cache {wiki, ssd: without the cache: decode}, naive "
        "{wiki, ssd: naive: decode}: the cache does the work",
        SMALL, "hashed",
    ),
    Claim(
        "the same with experts of real size",
        "",
        "`--tune eviction=layer-lru`, `--tune predict=gate`, `make bench-sida`",
        "the cache does the work: half of the experts in memory, 500 MB/s, tokens/s: everything "
        "{olmoe-shaped: everything: decode}, without reading ahead {olmoe-shaped: without reading ahead: decode}, "
        "without the cache "
        "{olmoe-shaped: without the cache: decode}, naive {olmoe-shaped: naive: decode}; everything is "
        "{olmoe-shaped: everything to without reading ahead|.2f}, {olmoe-shaped: everything to without the cache|.2f} "
        "and {olmoe-shaped: everything to naive|.2f} times as fast as these",
        f"{SHAPED}, routed as a trained model; without a cache there is room for a layer or two", "sida",
    ),
    Claim(
        "buffers beside the cache for experts read ahead",
        "an expert read ahead displaces nothing until it is used",
        NOT_BUILT,
        NOT_MEASURED,
        "an expert read ahead goes to its place in the cache; only copies to a second device have buffers "
        "(`moert/beside/gpu/device.py`)",
    ),
    Claim(
        "present experts first",
        "",
        "`moert/experts/streaming.py`, `make bench-sida`",
        "half of the experts in memory, 500 MB/s: "
        "{olmoe-shaped: everything to without present experts first|.2f} times the speed of waiting for all of a "
        "token's experts",
        f"{SHAPED}; results are added in a fixed order, so that answers are the same", "sida",
    ),
    Claim(
        "picture of chosen experts over tokens (Fig. 1)",
        "",
        "`python -m recipes.bench.sweeps`",
        "draws the middle layer of any pack; no result is kept",
        "a quarter of a layer's experts is cached, as 2 of 8 there",
    ),
)  # fmt: skip

FIDDLER = (
    Claim(
        "one request: what the card lacks is computed by the processor",
        "1.26 times as fast",
        "`--device`, `--tune device-experts=cheapest`, `make bench-devices`",
        "tokens/s, ours, latest experts copied, whole layers split: {rtx3060, one request: two devices}, "
        "{rtx3060, one request: LRU offloading}, {rtx3060, one request: layers split} (RTX 3060), "
        "{t4, one request: two devices}, {t4, one request: LRU offloading}, {t4, one request: layers split} (T4)",
        f"{SIMULATED}; experts at 4 bits; both sides work at once", "devices",
    ),
    Claim(
        "long prompts",
        "1.30 times as fast",
        "`make bench-devices`",
        "nothing won beside copying: {rtx3060, prompt of 2048: by the best of the others|.2f} (RTX 3060) and "
        "{t4, prompt of 2048: by the best of the others|.2f} (T4) times the best of the others with 2,048 tokens; the "
        "first prompt after a start {rtx3060, prompt of 512, the first after a start: by the best of the others|.2f} "
        "and {t4, prompt of 512, the first after a start: by the best of the others|.2f} with 512",
        SIMULATED, "devices",
    ),
    Claim(
        "beam search",
        "11.57 times as fast",
        "`--tune beams=4`, `make bench-devices`",
        "16 beams: {rtx3060, 16 beams: by the best of the others|.2f} (RTX 3060) and "
        "{t4, 16 beams: by the best of the others|.2f} (T4) times the best of the others",
        "the others read beams together too; the paper's baseline ran them one by one", "devices",
    ),
    Claim(
        "the most popular experts stay on the card",
        "popular experts are placed first",
        "`--tune device-keep=popular`, `--tune device-keep=expected`, `make bench-devices`",
        "hits with room for 20 and 50%: popular {hits on the card with room for 20%: popular|%} and "
        "{hits on the card with room for 50%: popular|%}, latest {hits on the card with room for 20%: lru|%} and "
        "{hits on the card with room for 50%: lru|%}, expected next (our default) "
        "{hits on the card with room for 20%: expected|%} and {hits on the card with room for 50%: expected|%}: a "
        "fixed placement is the worst of the three",
        SIMULATED, "devices",
    ),
    Claim(
        "random and worst placement",
        "",
        "`recipes/bench/cards.py`, `make bench-devices`",
        "hits with room for 20 and 50%: at random {hits on the card with room for 20%: at random|%} and "
        "{hits on the card with room for 50%: at random|%}, the least popular "
        "{hits on the card with room for 20%: least popular|%} and "
        "{hits on the card with room for 50%: least popular|%}, beside the most popular "
        "{hits on the card with room for 20%: popular|%} and {hits on the card with room for 50%: popular|%}",
        SIMULATED, "devices",
    ),
    Claim(
        "latency model: the processor's time grows with tokens, the card's does not",
        "",
        "`moert/beside/gpu/placement.py`, `make bench-devices`",
        "deciding a layer takes {deciding a layer, 8 of 8 experts} µs for 8 of 8 experts, "
        "{deciding a layer, 128 of 128 experts} µs for 128 of 128",
        "a roofline in place of a line",
        "devices",
    ),
    Claim(
        "latency model fitted on one half of the runs, judged on the other",
        "",
        "`make bench-fiddler`",
        "the processor's time of an expert with 1 to 128 tokens, error (median and 95th percentile): a line "
        "{this machine, error of the line: median|.1f}% and "
        "{this machine, error of the line: 95th percentile|.1f}%, the engine's own costs "
        "{this machine, error of the engine's costs: median|.1f}% and "
        "{this machine, error of the engine's costs: 95th percentile|.1f}%; runs alone, by the median of as many "
        "tokens, {this machine, error of the median of as many tokens: median|.1f}% and "
        "{this machine, error of the median of as many tokens: 95th percentile|.1f}%",
        "all cores of the machine that ran the bench, each time the least of a few calls; on a real card: not "
        "measured; the simulated clock and the model share their figures, so that errors there say nothing",
        "fiddler",
    ),
    Claim(
        "copy, card and processor by the tokens of an expert",
        "",
        "`make bench-fiddler`",
        "RTX 3060: a copy {rtx3060, tokens of an expert, 1: copy} ms; with 1, 16 and 128 tokens the card "
        "{rtx3060, tokens of an expert, 1: card}, {rtx3060, tokens of an expert, 16: card} and "
        "{rtx3060, tokens of an expert, 128: card} ms, the processor {rtx3060, tokens of an expert, 1: processor}, "
        "{rtx3060, tokens of an expert, 16: processor} and {rtx3060, tokens of an expert, 128: processor} ms; a copy "
        "is worth it from {rtx3060, a copy and the card are sooner: from} tokens (RTX 3060) and "
        "{t4, a copy and the card are sooner: from} (T4)",
        "from the cards' profiles; experts of Mixtral's shape at 4 bits", "fiddler",
    ),
    Claim(
        "popularity of experts",
        "",
        "`make bench-fiddler`",
        "tokens of an expert by those of the most popular one: mean "
        "{tokens of an expert by those of the most popular one: mean|.0f}%, deviation "
        "{tokens of an expert by those of the most popular one: deviation|.0f}%, least "
        "{tokens of an expert by those of the most popular one: least|.0f}%",
        "routing of the wiki model", "fiddler",
    ),
    Claim(
        "one request by the lengths of input and output",
        "",
        "`--tune device-keep=popular`, `make bench-fiddler`",
        "mean tokens/s of 32 to 256 tokens in and 64 to 512 out, ours, Fiddler's own, layers split, latest experts "
        "copied: {rtx3060, mean of these requests: two devices}, {rtx3060, mean of these requests: Fiddler's own}, "
        "{rtx3060, mean of these requests: layers split}, {rtx3060, mean of these requests: LRU offloading} (RTX "
        "3060), {t4, mean of these requests: two devices}, {t4, mean of these requests: Fiddler's own}, "
        "{t4, mean of these requests: layers split}, {t4, mean of these requests: LRU offloading} (T4)",
        f"{SIMULATED}; the method of the paper is settings of this engine", "fiddler",
    ),
    Claim(
        "long prompts by their length",
        "",
        "`make bench-devices`",
        "tokens/s with 512, 1,024, 2,048 and 4,096 tokens, ours: {rtx3060, prompt of 512: two devices}, "
        "{rtx3060, prompt of 1024: two devices}, {rtx3060, prompt of 2048: two devices}, "
        "{rtx3060, prompt of 4096: two devices} (RTX 3060), {t4, prompt of 512: two devices}, "
        "{t4, prompt of 1024: two devices}, {t4, prompt of 2048: two devices}, {t4, prompt of 4096: two devices} (T4); "
        "latest experts copied: {rtx3060, prompt of 512: LRU offloading}, {rtx3060, prompt of 1024: LRU offloading}, "
        "{rtx3060, prompt of 2048: LRU offloading}, {rtx3060, prompt of 4096: LRU offloading}; "
        "{t4, prompt of 512: LRU offloading}, {t4, prompt of 1024: LRU offloading}, "
        "{t4, prompt of 2048: LRU offloading}, {t4, prompt of 4096: LRU offloading}",
        SIMULATED, "devices",
    ),
    Claim(
        "widths of beams",
        "",
        "`--tune beams=4`, `make bench-fiddler`",
        "tokens/s of 4 and 16 beams, ours, Fiddler's own, latest experts copied: {rtx3060, 4 beams: two devices}, "
        "{rtx3060, 4 beams: Fiddler's own}, {rtx3060, 4 beams: LRU offloading}; {rtx3060, 16 beams: two devices}, "
        "{rtx3060, 16 beams: Fiddler's own}, {rtx3060, 16 beams: LRU offloading} (RTX 3060). 16 beams of Fiddler's own "
        "are {rtx3060, 16 beams by the best of the others, beam after beam: Fiddler's own|.1f} (RTX 3060) and "
        "{t4, 16 beams by the best of the others, beam after beam: Fiddler's own|.1f} (T4) times as fast as the best "
        "of the others, one beam after the other",
        SIMULATED, "fiddler",
    ),
    Claim(
        "how many experts fit",
        "",
        "`--tune gpu-memory=8GB`, `make bench-fiddler`",
        "tokens/s with room for 10, 50 and 75%, ours, Fiddler's own, latest experts copied: "
        "{a100, room for 10% of the experts: two devices}, {a100, room for 10% of the experts: Fiddler's own}, "
        "{a100, room for 10% of the experts: LRU offloading}; {a100, room for 50% of the experts: two devices}, "
        "{a100, room for 50% of the experts: Fiddler's own}, {a100, room for 50% of the experts: LRU offloading}; "
        "{a100, room for 75% of the experts: two devices}, {a100, room for 75% of the experts: Fiddler's own}, "
        "{a100, room for 75% of the experts: LRU offloading} (A100)",
        SIMULATED, "fiddler",
    ),
    Claim(
        "the drive as a third place",
        "experts in memory and on the card",
        "`--memory`, `make bench-devices`",
        "memory for half of the experts, tokens/s with a card and without: "
        "{rtx3060, memory for half of the experts: two devices} and "
        "{rtx3060, memory for half of the experts: all on the processor} (RTX 3060), "
        "{t4, memory for half of the experts: two devices} and "
        "{t4, memory for half of the experts: all on the processor} (T4)",
        SIMULATED, "devices",
    ),
    Claim(
        "a real card",
        "faster in every scenario",
        "`make check-gpu`",
        "lost: tokens/s with two devices and all on the processor {one request: two devices} and "
        "{one request: all on the processor} (one request), {prompt of 512: two devices} and "
        "{prompt of 512: all on the processor} (prompt of 512), {batch of 8: two devices} and "
        "{batch of 8: all on the processor} (batch of 8)",
        "an H200 beside 16 cores, and not a small card beside few; OLMoE's shape with 4 layers", "card",
    ),
    Claim(
        "a kernel in AVX512_BF16 for experts at 16 bits",
        "",
        NOT_BUILT,
        NOT_MEASURED,
        "kernels compute codes as they lie on the drive; Mixtral at 16 bits was not run",
    ),
)  # fmt: skip

LLM_IN_A_FLASH = (
    Claim(
        "only neurons that fire",
        "",
        "`--layout columns`, `make bench-flash`",
        "a token asks for {opt: columns, of whole experts|%} of the bytes of whole experts (opt), "
        "{g2p: columns, of whole experts|%} (g2p), {marks_sparse: columns, of whole experts|%} (marks_sparse); answers "
        "that differ: {opt, 50%: answers that differ}, {g2p, 50%: answers that differ} and "
        "{marks_sparse, 50%: answers that differ}",
        "gate and up are read whole; experts at 4 bits", "flash",
    ),
    Claim(
        "low-rank predictor of neurons (§3.1)",
        "1.25% of the model (OPT 6.7B)",
        "`moeconv train-neurons`, `--tune neurons=predicted`, `make bench-flash`",
        "opt: {opt: predictor: size|.1f}% of the pack, names {opt: predictor: firing neurons that it names|%} of the "
        "neurons that fire and {opt: predictor: neurons that it names|%} of all, loses "
        "{opt: loss by the predictor|.1f}%; of g2p it names "
        "{g2p: predictor: neurons that it names|%} of all, which leave out next to no block",
        "a threshold for each expert", "flash",
    ),
    Claim(
        "window over the last tokens",
        "5 tokens: 2.4% of the neurons to load in place of 10%, 24% kept (OPT 6.7B)",
        "`--tune keep-neurons=window`, `make bench-flash`",
        "opt, 4 tokens: {opt: window of 4: loaded|.1f}% to load in place of {opt: fire for a token|.1f}%, "
        "{opt: window of 4: kept|%} kept; g2p, whose tokens go to other experts, {g2p: window of 4: loaded|.1f}% in "
        "place of {g2p: fire for a token|.1f}%",
        SMALL, "flash",
    ),
    Claim(
        "the window beside other rules",
        "",
        "`--tune keep-neurons=recent`, `make bench-flash`",
        "hits with room for half of opt's blocks: window {opt: room for 50% of blocks: window|%}, lru "
        "{opt: room for 50% of blocks: lru|%}, recent (our default) {opt: room for 50% of blocks: recent|%}, knowing "
        "the future {opt: room for 50% of blocks: Belady|%}; of g2p's {g2p: room for 50% of blocks: window|%}, "
        "{g2p: room for 50% of blocks: lru|%}, {g2p: room for 50% of blocks: recent|%} and "
        "{g2p: room for 50% of blocks: Belady|%}",
        "", "flash",
    ),
    Claim(
        "row and column of a neuron bundled (§3.2)",
        "chunks of 32 KiB",
        "`--layout neuron`, `make bench-flash`",
        "opt, at 500 and 100 MB/s, tokens/s without and with: {opt, ssd, steps: + window: decode} and "
        "{opt, ssd, steps: + bundles: decode}, {opt, board, steps: + window: decode} and "
        "{opt, board, steps: + bundles: decode}",
        "a neuron of opt is smaller than a sector of the drive", "flash",
    ),
    Claim(
        "all steps beside loading everything, half of the memory (Tab. 2)",
        "4 to 5 times as fast by CPU, 20 to 25 times by GPU",
        "`--layout neuron`, `--tune neurons=predicted`, `make bench-flash`",
        "opt: {opt, ssd, steps: kept by use to naive|.1f} times at 500 MB/s, "
        "{opt, board, steps: kept by use to naive|.1f} at 100 MB/s; OPT-1.3B's shape with opt's firings: "
        "{OPT-1.3B like opt, ssd, 50%: predicted neurons to naive|.1f} at 500 MB/s",
        "keeping whole experts wins {opt, ssd, steps: whole experts, half kept to naive|.1f} times (opt) and "
        "{OPT-1.3B like opt, ssd, 50%: whole experts to naive|.1f} times (OPT-1.3B) already; on a GPU: not measured",
        "flash",
    ),
    Claim(
        "neurons of Switch Transformers",
        "dense models only",
        "`--layout columns`, `make bench-flash`",
        "lost: with half in memory at 500 MB/s {g2p, ssd: neurons 50% to whole experts|.2f} (g2p), "
        "{marks, ssd: neurons 50% to whole experts|.2f} (marks) of the speed of whole experts, "
        "{switch-base-8 like marks_sparse, ssd, 50%: neurons to whole experts|.2f} in Switch-base-8's shape; "
        "{marks_sparse, ssd: neurons 50% to whole experts|.2f} where few fire (marks_sparse)",
        "`--layout auto` leaves small experts whole", "flash",
    ),
    Claim(
        "neurons bundled with their closest friend",
        "did not pay: the closest friends are always the same few",
        "`--layout columns`, `make bench-flash`",
        "closest friends are {opt: neurons that are anyone's closest friend|.1f}% of opt's neurons. Disjoint blocks of "
        "neurons that fire together win: put together on calibration text, a token asks for "
        "{opt, blocks of 2: in the pack|.1f}% of blocks of 2, as opt's pack has them, and for "
        "{opt, blocks of 8: in the pack|%} of blocks of 8; by frequency for "
        "{opt, blocks of 2: by frequency on calibration text|.1f}% and "
        "{opt, blocks of 8: by frequency on calibration text|%}",
        "disjoint blocks; by frequency where that asks for fewer blocks of other text", "flash",
    ),
    Claim(
        "neurons leave by copying the last row to their place (§3.3)",
        "65 ms a token for management of memory (OPT 6.7B)",
        "slots in place of copies; `make bench-flash`",
        "opt, room for half: slots take {opt: managing slots|.2f} ms a token and move nothing, copies "
        "{opt: copying the last neurons|.2f} ms more for {opt: bytes of copies|.1f} MB; OPT-1.3B's shape with opt's "
        "firings: {OPT-1.3B like opt: managing slots|.1f} ms, and {OPT-1.3B like opt: copying the last neurons|.1f} ms "
        "more for {OPT-1.3B like opt: bytes of copies|.0f} MB",
        "replayed, each neuron for itself at 16 bits; the runtime has slots of equal size "
        "(`moert/beside/flash/store.py`)", "flash",
    ),
    Claim(
        "throughput by the size of a read",
        "over 6 GiB/s for long reads, far less for short ones",
        "`moert bench --drive`, `python -m recipes.bench.sweeps --drive`, `make bench-flash`",
        "MB/s of direct reads of 4 KiB, 32 KiB and 512 KiB: one at a time {reads of 4096 bytes, 1 at once|.0f}, "
        "{reads of 32768 bytes, 1 at once|.0f} and {reads of 524288 bytes, 1 at once|.0f}; 32 at once "
        "{reads of 4096 bytes, 32 at once|.0f}, {reads of 32768 bytes, 32 at once|.0f} and "
        "{reads of 524288 bytes, 32 at once|.0f}",
        "a server's virtual drive, whose host may hold what was read before", "flash",
    ),
    Claim(
        "together with speculative decoding",
        "",
        "`--tune draft=auto`, `make bench-flash`, `make bench-drafts`",
        "opt by neurons, speed with drafts beside without, a quarter in memory: quotations "
        "{opt, a quarter of them, a quotation: drafts beside none|.1f}, its likeliest text "
        "{opt, a quarter of them, the likeliest text: drafts beside none|.2f}; the same tokens",
        "drafts by n-grams in place of a draft model", "flash",
    ),
)  # fmt: skip

PAPERS: Mapping[str, Sequence[Claim]] = {
    "edgemoe": EDGEMOE,
    "sida": SIDA,
    "mixtral-offloading": MIXTRAL_OFFLOADING,
    "fiddler": FIDDLER,
    "llm-in-a-flash": LLM_IN_A_FLASH,
}
"""Claims of each paper, by the name of its block."""
