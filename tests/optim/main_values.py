"""All main values and states of a distributed optimizer at once, as tensors, however they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_megatron.optim import DistributedOptimizer, float8


@contextmanager
def main_values(sharded: DistributedOptimizer) -> Iterator[None]:
    """Inside the ``with`` block every ``shard.main`` and every state holds its values; what they then are is kept."""
    state, stores = sharded.optimizer.state, sharded._cut.stores
    sharded.kept.settle()
    empty = {main: main.detach() for main in stores}
    for main, store in stores.items():
        main.data = store.read(0, main.numel()).view(main.shape)
    kept = {shard.main: sharded.kept.states(shard) for shard in sharded.shards if shard.main in state}
    narrow = {main: state[main] for main, states in kept.items() if any(isinstance(v, float8.Moment) for v in states.values())}
    for main in narrow:
        state[main] = {
            name: value.read(0, main.numel()) if isinstance(value, float8.Moment) else value
            for name, value in kept[main].items()
        }
    yield
    for main, before in narrow.items():
        for name, value in kept[main].items():
            if isinstance(value, float8.Moment):
                value.write(state[main][name], 0, main.numel())
        state[main] = before
    for main, store in stores.items():
        store.write(main.detach().view(-1), 0, main.numel())
        main.data = empty[main]
