"""The arithmetic: its interface for models, a readable version in numpy, and a fast one in C."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moert.errors import said
from moert.kernels import library
from moert.kernels.library import InstructionSetInvalid

if TYPE_CHECKING:
    from moert.kernels.backend import Backend

REFERENCE = "reference"
AUTO_KERNELS = "auto"


def auto_name() -> str:
    """Returns the name of the kernels that "auto" stands for here."""
    found = library.load()
    return REFERENCE if found is None else found.instruction_sets[found.choose()].name


def open_backend(name: str = AUTO_KERNELS, threads: int = 1) -> Backend:
    """Returns a backend. `name`: "reference", an instruction set of the native kernels, or "auto" for the best of them,
    and the reference where they are missing. Raises InstructionSetInvalid."""
    found = None if name == REFERENCE else library.load()
    sets = [] if found is None else [each.name for each in found.instruction_sets if each.runs]
    if name not in (AUTO_KERNELS, REFERENCE, *sets):
        if found is None:
            why, others = f"there are no native kernels ({library.missing()}): ", f", or {library.advice()}"
        else:
            why, others = "", f", or one of {', '.join(sets)}"
        raise InstructionSetInvalid(
            f"{said('kernels', name)} does not run here: {why}use {AUTO_KERNELS} or {REFERENCE}{others}"
        )
    from moert.kernels.backend import opaque

    if found is not None:
        from moert.kernels.native import NativeBackend

        return opaque(NativeBackend(found, found.choose(None if name == AUTO_KERNELS else name), threads))
    from moert.kernels.reference import ReferenceBackend

    return opaque(ReferenceBackend())
