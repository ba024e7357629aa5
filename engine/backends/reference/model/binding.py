"""Whether the tensors that came are the tensors that the model reads: all of them, no other.

A tensor that the epoch lacks, or one in it that no part of the model reads, is a model that would
compute something else. It is an error that names the tensor; a warning would be served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from engine.backends.reference.model.checkpoint import DTYPE, TensorSource
from plumbing.errors import UnderstudyError

if TYPE_CHECKING:
    from gms.client import TensorRecord

_AGAIN = (
    "end every engine that maps this epoch, so that the next one loads it anew, and run the same"
    " release of understudy in every container"
)


def check_bound(
    wanted: Iterable[TensorSource], epoch: str, found: Mapping[str, TensorRecord]
) -> None:
    """Check that `epoch` has exactly the tensors `wanted`, each as it is read.

    Raises:
        UnderstudyError: `model.unbound`, naming the first tensor that is missing, surplus or of
            another shape or type; `details` has all the missing and surplus ones.
    """
    needed = {tensor.name: tensor for tensor in wanted}
    missing = [name for name in needed if name not in found]
    surplus = [name for name in found if name not in needed]
    if missing:
        raise _unbound(
            f"tensor {missing[0]}{_more(missing)} of the model is not in epoch {epoch}",
            missing,
            surplus,
        )
    if surplus:
        raise _unbound(
            f"tensor {surplus[0]}{_more(surplus)} of epoch {epoch} belongs to no part of the model",
            missing,
            surplus,
        )
    for name, tensor in needed.items():
        record = found[name]
        there, here = (record.dtype, tuple(record.shape)), (DTYPE, tensor.shape)
        if there != here or record.nbytes != tensor.nbytes or record.strides is not None:
            raise _unbound(
                f"tensor {name} is {record.dtype} {list(record.shape)} in epoch {epoch}, and"
                f" {DTYPE} {list(tensor.shape)} in the model",
                [name],
                [],
            )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _unbound(what: str, missing: list[str], surplus: list[str]) -> UnderstudyError:
    return UnderstudyError("model.unbound", f"{what}; {_AGAIN}", missing=missing, surplus=surplus)
