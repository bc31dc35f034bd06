"""From gradients that arrive during a backward to reductions that start: see Note [When a gradient is final]."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from weakref import ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.buffers import Bucket
from lightning_megatron.optim.readiness import Readiness, StageOrder


class Arrivals:
    """Launches the reduction of buckets when their gradients are final.

    Args:
        buckets: in the order in which they are launched.
        names: of the parameters, for messages.
        stages: the parameters of each pipeline stage on this rank.
        mesh: for messages.
        overlap: launch during backwards; otherwise everything is launched by ``all_done``.

    Attributes:
        arrived: the parameters, by their number in the buckets, of which a gradient has arrived in this step.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        names: Mapping[nn.Parameter, str],
        *,
        stages: Mapping[int, Sequence[nn.Parameter]],
        mesh: Mesh,
        overlap: bool,
    ) -> None:
        self._buckets, self._mesh, self._overlap = buckets, mesh, overlap
        params = [param for bucket in buckets for param in bucket.params]
        self._names = [names[param] for param in params]
        self._bucket_of = [bucket for bucket in buckets for _ in bucket.params]
        index = {param: position for position, param in enumerate(params)}
        self._readiness = Readiness([[index[param] for param in bucket.params] for bucket in buckets])
        held = {stage: [index[param] for param in members if param in index] for stage, members in stages.items()}
        self._stages = StageOrder(held)
        self._index = index
        self.arrived: set[int] = set()
        self._hooks = [_hook_accumulation(param, self._hook(i)) for i, param in enumerate(params)]

    def last_backward(self, stage: int, pattern: Hashable) -> None:
        """The stage's last backward of the step begins."""
        self._readiness.arm(self._stages.begin(stage), pattern)

    def backward_done(self, stage: int) -> None:
        """The stage's last backward of the step has ended, or is left out."""
        if self._overlap:
            self._launch(self._readiness.finish(self._stages.end(stage)))

    def all_done(self) -> None:
        """No more gradients come; launch what is left."""
        self._launch(self._readiness.finish_all())

    def has_arrived(self, param: nn.Parameter) -> bool:
        """Whether a gradient of the parameter has arrived in this step."""
        return self._index[param] in self.arrived

    def reset(self) -> None:
        """Begin a new step."""
        self.arrived.clear()
        self._readiness.reset()
        self._stages.reset()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _launch(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._buckets[index].launch_reduce()

    def _hook(self, param: int) -> Callable[[Tensor], None]:
        # Parameters own their hooks where the garbage collector does not look, and buckets own parameters.
        weak = ref(self)

        def arrived(_: Tensor) -> None:
            owner = weak()
            if owner is not None:
                owner.arrived.add(param)
                if owner._overlap:
                    owner._arrived(param)

        return arrived

    def _arrived(self, param: int) -> None:
        if self._readiness.is_launched(param) and self._bucket_of[param].is_reducing:
            raise RuntimeError(
                f"{self._mesh.coordinate} a gradient of {self._names[param]!r} arrived after its bucket had been "
                f"sent to be reduced: the last backward of this step reached it more often than in the steps before. Set "
                f"DistributedOptimizerConfig(overlap_grad_reduce=False) for a model whose use of parameters changes."
            )
        self._launch(self._readiness.arrived(param))


def _hook_accumulation(param: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    is_trained = param.requires_grad
    param.requires_grad_(True)  # torch hooks no parameter that is frozen at the moment
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    param.requires_grad_(is_trained)
    return handle
