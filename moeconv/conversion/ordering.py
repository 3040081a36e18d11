"""The order in which the neurons of each expert lie in a pack by neurons: those that fire most often on the calibration
text come first, so that few blocks hold most of what fires."""

from __future__ import annotations

from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.conversion.lessons import digest_of
from moeconv.errors import ConversionError
from moeconv.measure.firing import by_frequency, covered
from moeconv.measure.workdir import WorkDir
from moert.pack.errors import PackError
from moert.pack.neurons import NeuronOrder

_FEW = 0.1


def neuron_order(bench: Bench, work: WorkDir, account: Account) -> NeuronOrder | None:
    """None where experts do not lie by neurons. It is kept in the work directory. Raises ConversionError."""
    if bench.coding.neurons is None:
        return None
    about = {"subject": work.path.name, "samples": bench.moment_samples}
    path = work.path / f"order-{digest_of(about)[:12]}.safetensors"
    with account.step("order of neurons", bench.journal):
        if bench.journal.sealed(path):
            try:
                found = NeuronOrder.from_bytes(path.read_bytes())
                found.check(bench.spec)
            except (OSError, PackError) as error:
                raise ConversionError(f"{path} can't be read ({error}): delete it, and it is counted again") from None
            return found
        counts = bench.firing_counts()
        found = by_frequency(counts)
        work.save_bytes(path.name, found.to_bytes(), bench.journal)
    first = covered(counts, _FEW)
    account.say(f"neurons lie by how often they fire: of an expert's, the first {_FEW:.0%} do {first:.0%} of it")
    return found
