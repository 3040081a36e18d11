"""`python -m recipes.bench.outlook_machine`: the machine of docs/models.md, and the cost of a layer and of a miss, from
figures in docs/results. Writes moeconv/plan/machine.json; measures only the memory that moert itself holds.

- Kernels: the figures of KERNELS for a linear map with one token, groups of 64. Trellis codes were measured on a
  processor without AMX only: their weights a second there, times the ratio of both machines with plain codes at 2 bits.
- A layer: less.json's runs of wiki and wikids with all experts in memory, less the time of their weights by these
  kernels.
- A miss: the additional time of a token there on the imitated drive of 500 MB/s with less room, for each missing
  expert. Experts of 16 kB are read in less time, so all of it is the cost of a miss.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median

from moeconv.conversion.host import facts
from moeconv.plan.forecast import MACHINE, SOURCE, Drive, Machine, Processor, Work, prospect, token_s
from moeconv.plan.outlook import Host, mixture
from moeconv.plan.problem import Storage
from moeconv.source.outline import CONFIG, Outline
from moert.pack.codec import CODES
from moert.pack.files import write_atomically
from recipes.bench.program import as_program
from recipes.bench.result import Result, read

OUT = Path("moeconv/plan") / MACHINE
RESULTS = Path("docs/results")
KERNEL_BITS = (2, 3, 4, 8, 16)
KERNELS, TRELLIS_KERNELS = "kernels-amx.json", "kernels-avx512vbmi.json"
REFERENCES = ("wiki", "wikids")
SHARES = ("25%", "50%")
SSD = Drive(500e6, 500e6)
BITS_PER_WEIGHT = {"wiki": 2.24, "wikids": 2.31}
"""What their recipes' conversions gave: expert bytes in docs/results/demo.json and references.json, over the
weights."""


def work_of(name: str, bits_per_weight: float, host: Host) -> Work:
    """Of a model in recipes/models, converted as its recipe does."""
    outline, storage = Outline.read(Path("recipes/models") / name / CONFIG), Storage()
    mixed = mixture(outline.spec, storage, (2, 3, 4), bits_per_weight)
    assert mixed is not None
    return prospect(outline.spec, storage, mixed, None, outline.description.computed, host).work


def layer_s(work: Work, processor: Processor, token: float) -> float:
    """Of a token that took so long with all experts in memory, what each layer took beside its weights."""
    bare = replace(processor, layer_s=0.0)
    return (token - token_s(work, bare, SSD, 1.0)) / work.layers


def miss_s(work: Work, less: Result, name: str, share: str) -> float:
    where = f"{name}, ssd"
    whole, streamed = (
        1 / less.by_name[f"{where}: {what}: decode"].value for what in ("moert, all in memory", f"exact {share}")
    )
    missed = 1 - less.by_name[f"{where}: exact {share}: hits"].value / 100
    return (streamed - whole) / (missed * work.expert_layers * work.top_k)


def machine(kernels: Result, trellis: Result, less: Result, host: Host) -> Machine:
    """Out of the rows of these files."""
    speeds: dict[float, float] = {bits: 1e9 * kernels.by_name[_row(bits)].value for bits in KERNEL_BITS}
    ratio = kernels.by_name[_row(2)].value / trellis.by_name[_row(2)].value
    rates = {bits: ratio * trellis.by_name[f"trellis, {bits} bits, 1 token: moert"].value for bits in CODES}
    bare = Processor(speeds, {bits: 1e9 * rate * bits / 8 for bits, rate in rates.items()}, 0.0, 0.0)
    works = {name: work_of(name, BITS_PER_WEIGHT[name], host) for name in REFERENCES}
    whole = {name: 1 / less.by_name[f"{name}, ssd: moert, all in memory: decode"].value for name in REFERENCES}
    hardware = kernels.context["hardware"]
    return Machine(
        f"{hardware['processor']}, {hardware['cores']} cores, {hardware['isa']}",
        replace(
            bare,
            layer_s=mean(layer_s(works[name], bare, whole[name]) for name in REFERENCES),
            miss_s=median(miss_s(works[name], less, name, share) for name in REFERENCES for share in SHARES),
        ),
        host,
    )


def _row(bits: int) -> str:
    return "linear, 16 bits" if bits == 16 else f"linear, {bits} bits, groups of 64"


def main() -> None:
    process = facts()["process"]
    host = Host(process["held_bytes"], process["thread_bytes"], widened=False)
    found = machine(*(read(RESULTS / name) for name in (KERNELS, TRELLIS_KERNELS, "less.json")), host)
    write_atomically(OUT, (json.dumps({"made_by": SOURCE, **asdict(found)}, indent=1) + "\n").encode())
    print(f"written to {OUT}")


if __name__ == "__main__":
    as_program(main, __doc__)
