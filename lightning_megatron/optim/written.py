"""Values between parameters and main shards: main to parameter after a step, and back where somebody has written a parameter.

Note [Written by others]
Parameters are views of the flat buffers, and main values of 16-bit parameters are copies: whoever writes values into a
parameter (``load_state_dict`` in a hook, a clamp of weights, an average that is swapped in) knows of neither. Both are found
before a step by what costs the host next to nothing. The strategy writes into the buffers, which leaves a parameter's version
count alone, so a version that has changed is somebody else's writing. An address that has changed is ``param.data = ...``:
the values are brought back into the buffer, and the parameter is a view of it again. Of a parameter that was written, main
values stay where the parameter still is what they round to: weights that are swapped out and in again lose no bit. What is
written through ``param.data`` in place changes neither count nor address, so 16-bit parameters are to be written under
``torch.no_grad()`` instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.buffers import Bucket
from lightning_megatron.optim.cutting import Cut
from lightning_megatron.optim.shards import Shard, by_dtype


class MainValues:
    """Keeps parameters and main shards of one optimizer alike.

    Args:
        buckets: its buckets.
        cut: its shards.
        names: of the parameters, for messages.
        mesh: for messages.
    """

    def __init__(self, buckets: Sequence[Bucket], cut: Cut, *, names: Mapping[nn.Parameter, str], mesh: Mesh) -> None:
        self._cut, self._names, self._mesh = cut, names, mesh
        self._params: list[nn.Parameter] = []
        self._views: list[Tensor] = []
        for bucket in (bucket for bucket in buckets if not bucket.is_narrow):  # 8-bit ones have no values to be written
            for placement, param in zip(bucket.plan.placements, bucket.params, strict=True):
                self._params.append(param)
                self._views.append(bucket.values[placement.start : placement.stop].view(param.shape))
        self._places = [view.data_ptr() for view in self._views]
        self._versions: list[int] = []
        apart = {id(main) for main in cut.stores} | {id(shard.main) for shard in cut.shards if shard.gathered}
        self._copied = [
            (shard, value)
            for shard, value in zip(cut.shards, cut.values, strict=True)
            if shard.main.dtype != value.dtype and id(shard.main) not in apart
        ]
        self.accept()

    def accept(self, only: Collection[nn.Parameter] | None = None) -> None:
        """Take main values for those of the parameters, of all or of some, as they are now: both have been loaded."""
        if only is None:
            self._versions = [param._version for param in self._params]
            return
        for index, param in enumerate(self._params):
            if param in only:
                self._versions[index] = param._version

    @torch.no_grad()
    def take_in(self) -> None:
        """Bring what others have written into parameters into buckets and main shards. See Note [Written by others].

        Nothing may be in flight. All ranks of tp have written the same parameters, if the optimizer wants whole ones.

        Raises:
            ValueError: a parameter's ``data`` has become a tensor of another shape, dtype or device.
        """
        with torch._C.DisableTorchFunction():  # modes that are on the stack would see each look at a parameter
            written = {
                param: view
                for param, view, place, version in zip(self._params, self._views, self._places, self._versions, strict=True)
                if param._version != version or param.data_ptr() != place
            }
        if not written:
            return
        for param, view in written.items():
            if param.data_ptr() != view.data_ptr():
                self._bring_back(param, view)
        self._follow(written)
        self.accept()

    def _bring_back(self, param: nn.Parameter, view: Tensor) -> None:
        found, wanted = ((tuple(t.shape), t.dtype, t.device) for t in (param, view))
        if found != wanted:
            raise ValueError(
                f"{self._mesh.coordinate} the data of parameter {self._names[param]!r} has been replaced by a tensor of shape "
                f"{found[0]}, {found[1]} on {found[2]}; it was {wanted[0]}, {wanted[1]} on {wanted[2]} when its optimizer was "
                f"set up, and has to stay so. Write values in place, under torch.no_grad(): param.copy_(values)."
            )
        view.copy_(param)
        param.data = view

    def _follow(self, written: Mapping[nn.Parameter, Tensor]) -> None:
        for shard, value in self._copied:
            if shard.param in written:
                flat = shard.main.view(-1)
                flat.copy_(torch.where(flat.to(value.dtype) == value, flat, value))
        for shard in self._cut.shards:
            if shard.param in written and (store := self._cut.stores.get(shard.main)) is not None:
                store.follow()
        for matrix in self._cut.gathered:
            if matrix.shard.param in written:
                matrix.follow()

    def publish(self) -> None:
        """Copy main shards into this rank's ranges of the parameter buffers, rounded."""
        for mains, values in self._pairs():
            torch._foreach_copy_(values, mains)

    def refresh(self) -> None:
        """Read all main shards from the parameters."""
        self.take_in()  # where ``data`` has been replaced
        for mains, values in self._pairs():
            torch._foreach_copy_(mains, values)
        for store in self._cut.stores.values():
            store.refresh()
        for matrix in self._cut.gathered:
            matrix.refresh()

    @torch.no_grad()
    def refresh_shard(self, shard: Shard) -> None:
        """Read one main shard from the parameter. For a gathered one the ranks of tp call it together."""
        if shard.gathered:
            next(matrix for matrix in self._cut.gathered if matrix.shard is shard).refresh()
        elif (store := self._cut.stores.get(shard.main)) is not None:
            store.refresh()
        else:
            flat = shard.param.detach().reshape(-1)[shard.start : shard.stop]
            shard.main.copy_(flat.view(shard.main.shape))

    def _pairs(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Main shards that are copies, and the ranges of the parameter buffer they belong to, one pair of lists a dtype."""
        pairs = [(shard.main.detach().view(-1), value) for shard, value in self._copied]
        values = by_dtype(value for _, value in pairs)
        dtypes = [same[0].dtype for same in values]
        mains = [[main for main, value in pairs if value.dtype == dtype] for dtype in dtypes]
        return list(zip(mains, values, strict=True))
