"""The readable version of all arithmetic with weights, in numpy. Native kernels are tested against it."""

from moert.kernels.reference.arithmetic import Plain, ffn, product
from moert.kernels.reference.backend import ReferenceBackend
from moert.kernels.reference.codes import weights

__all__ = ["Plain", "ReferenceBackend", "ffn", "product", "weights"]
