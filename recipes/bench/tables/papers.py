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
        "`--quantizer channel`, `--tune signal=metric`, `--tune allocation=greedy`",
        NOT_MEASURED,
        "[the options](method.md#the-papers-own-algorithm) are there; no kept result has them together",
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
        "`make demo`",
        "sizes only: {g2p: expert bytes of INT4|%} (g2p) and {wiki: expert bytes of INT4|%} (wiki) of the bytes at "
        "INT4; losses of INT4 and STI-like widths beside ours: not measured",
        "", "demo",
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
        "named by the next layer's router, and read only if that saves time; experts of 1 MB and more by path tables: "
        "not measured",
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
        NOT_MEASURED,
        "by default in `moert serve`, and in `moert chat` at a terminal; the first request ends it",
    ),
    Claim(
        "times of samples beside the baselines (Fig. 12)",
        "",
        "`python -m recipes.bench.sweeps`",
        NOT_MEASURED,
        "draws the times of packs; baselines are not among them, and no result is kept",
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
        f"{SHAPED}; trained models: not measured", "ahead",
    ),
    Claim(
        "targets of 5, 10, 15 and 20% (Fig. 15)",
        "",
        "`python -m recipes.bench.sweeps`",
        NOT_MEASURED,
        "draws packs of several targets; no result is kept",
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
        "",
        "tried, not kept",
        "nothing to tell from noise, for three times the reading; no result is kept",
        LOGGED,
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
        "its parts: `--tune routing=hash`, `--tune predict=hash`",
        NOT_MEASURED,
        "first in, first out is not an option any more; the parts were measured one by one",
    ),
    Claim(
        "idle experts and dependence on other tokens (Fig. 4 and 7)",
        "",
        "`python -m recipes.bench.sweeps`",
        NOT_MEASURED,
        "draws both for any pack; no result is kept",
    ),
    Claim("the constant c (Eq. 2)", "", NO_BENCH, NOT_MEASURED),
    Claim("Tab. 2 and Fig. 2", "", NO_BENCH, NOT_MEASURED),
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
        f"{SMALL}; at real size: not measured", "hashed",
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
        "`moert/experts/streaming.py`",
        "built; its gain alone is not measured",
        "results are added in a fixed order, so that answers are the same",
    ),
    Claim("picture of chosen experts over tokens (Fig. 1)", "", NOT_BUILT, NOT_MEASURED),
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
        "`make bench-devices`",
        NOT_MEASURED,
        "the bench has both as rows (*at random*, *least popular*); the kept result is older",
    ),
    Claim(
        "latency model: the processor's time grows with tokens, the card's does not",
        "",
        "`moert/beside/gpu/placement.py`, `make bench-devices`",
        "deciding a layer takes {deciding a layer, 8 of 8 experts} µs for 8 of 8 experts, "
        "{deciding a layer, 128 of 128 experts} µs for 128 of 128",
        "fitted on one half of the runs and judged on the other: not measured; the simulated clock and the model share "
        "their figures, so that its errors there say nothing",
        "devices",
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
    Claim("Fig. 4, 7 and 9 to 12", "", NO_BENCH, NOT_MEASURED),
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
        "counted, not built; `make bench-flash`",
        "closest friends are {opt: neurons that are anyone's closest friend|.1f}% of opt's neurons. Disjoint blocks of "
        "8 would win: a token asks for {opt, blocks of 8: together|%} of them if put together by firing, "
        "{opt, blocks of 8: by frequency|%} by frequency on the same text, {opt, blocks of 8: in the pack|%} in the "
        "pack",
        "packs have the order of frequency on calibration text", "flash",
    ),
    Claim(
        "neurons leave by copying the last row to their place (§3.3)",
        "65 ms a token for management of memory (OPT 6.7B)",
        NOT_BUILT,
        NOT_MEASURED,
        "blocks have slots of equal size, and none is moved (`moert/beside/flash/store.py`)",
    ),
    Claim(
        "throughput by the size of a read",
        "over 6 GiB/s for long reads, far less for short ones",
        "`moert bench --drive`, `python -m recipes.bench.sweeps --drive`",
        "prints and draws it; no result is kept",
        LOGGED,
    ),
    Claim(
        "together with speculative decoding",
        "",
        NOT_BUILT,
        NOT_MEASURED,
        "neither a draft model nor drafts by n-grams",
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
