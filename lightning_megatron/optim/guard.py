"""Nobody reads a parameter whose gathering is still in flight.

Note [Who waits for gathered parameters]
Module forwards wait for the buckets of the parameters that the module owns, by a forward pre-hook: that covers kernels which
torch does not dispatch in Python. Everything else that Python code does with such a parameter (a functional use outside its
module, a weight penalty, a callback that looks at weights between steps) passes through ``ParameterGuard``, a torch function
mode that stands on the stack while something is in flight. It waits where a parameter is read, not where only its shape is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode
from torch.utils.hooks import RemovableHandle

from lightning_megatron.optim.buffers import Bucket

# What tells about a tensor without reading its elements: ``p.shape``, ``p.size()``, ``p.grad = ...``
_VALUE_ATTRIBUTES = ("data", "real", "imag", "T", "H", "mT", "mH")
_METADATA = frozenset(
    (
        *("size", "dim", "stride", "numel", "nelement", "ndimension", "element_size", "is_contiguous", "is_floating_point"),
        *("is_complex", "storage_offset", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
        *("__len__", "__hash__", "get_device", "is_inference", "is_shared", "has_names", "is_signed"),
    )
)


class ParameterGuard(TorchFunctionMode):
    """Waits for parameters that a torch function is given while they are being gathered."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        super().__init__()
        self._buckets = list(buckets)
        self._bucket_of = {id(param): bucket for bucket in self._buckets for param in bucket.params}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not any(bucket.is_gathering for bucket in self._buckets)

    def start(self) -> None:
        """Put the guard on the stack, if anything is in flight."""
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not self.is_idle and self not in stack:
            self.__enter__()  # type: ignore[no-untyped-call]

    @staticmethod
    def release() -> None:
        """Take guards that are idle off the stack, as far as they are on top of it."""
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        while stack and isinstance(top := stack.pop(), ParameterGuard) and top.is_idle:
            _pop_mode()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the parameters among the arguments, then call the function."""
        kwargs = kwargs or {}
        for value in _flat(args):
            self._wait_for(value, func)
        for value in _flat(kwargs.values()):
            self._wait_for(value, func)
        return func(*args, **kwargs)

    def _wait_for(self, value: Any, func: Callable[..., Any]) -> None:
        if isinstance(value, Tensor) and (bucket := self._bucket_of.get(id(value))) and bucket.is_gathering and _reads(func):
            bucket.wait_gather()


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _reads(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _VALUE_ATTRIBUTES
    return name not in _METADATA and name != "__set__"


class ForwardWait:
    """A forward pre-hook that waits for the buckets of a module's own parameters."""

    only_waits = True
    """It does not look at what the module is called with."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._buckets = list(buckets)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Wait, and let the guard go when nothing is left to wait for."""
        waited = False
        for bucket in self._buckets:
            if bucket.is_gathering:
                bucket.wait_gather()
                waited = True
        if waited:
            ParameterGuard.release()

    def __deepcopy__(self, memo: dict[int, object]) -> ForwardWait:
        return ForwardWait(())  # a copied module has parameters of its own

    def __reduce__(self) -> tuple[type[ForwardWait], tuple[tuple[()]]]:
        return ForwardWait, ((),)


def wait_in_forwards(module: nn.Module, buckets: Iterable[Bucket]) -> list[RemovableHandle]:
    """Hook every module that owns parameters of the buckets; shared parameters are waited for by each owner."""
    bucket_of = {id(param): bucket for bucket in buckets for param in bucket.params}
    handles = []
    for child in module.modules():
        own = {id(bucket): bucket for p in child._parameters.values() if (bucket := bucket_of.get(id(p)))}
        if own:
            handles.append(child.register_forward_pre_hook(ForwardWait(own.values())))
    return handles
