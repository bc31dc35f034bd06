"""What is handed to Transformer Engine's attention over cut sequences, by a stand-in that does what its documents say.

The stand-in gathers the tokens of all ranks, puts them in order by the library's own rule (``2 * size`` chunks of every
sequence, of which rank r holds r and ``2 * size - 1 - r``), and attends by a mask.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from lightning_megatron import MegatronStrategy
from lightning_megatron.context_parallel.attention import ContextParallelAttention
from lightning_megatron.context_parallel.block import BlockAttention
from lightning_megatron.context_parallel.layout import SequenceLayout
from lightning_megatron.context_parallel.parts import take
from lightning_megatron.context_parallel.tiles import Pattern
from lightning_megatron.layers.core_attention import CoreAttention
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.te_backend import context as te_context
from lightning_megatron.layers.torch_backend import CausalAttention
from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed
from tests.context_parallel.test_attention import PACKED, B, S, explicit, inputs


class DotProductAttention(nn.Module):
    """Of ``transformer_engine.pytorch``, as far as context parallelism over ``thd`` and ``sbhd`` needs it."""

    def __init__(self, heads: int, channels: int, *, num_gqa_groups: int, **options: Any) -> None:
        super().__init__()
        assert options == {"attention_dropout": 0.0, "qkv_format": "sbhd", "layer_number": 1}
        self.sizes = (heads, num_gqa_groups, channels)

    def set_context_parallel_group(self, group: Any, ranks: list[int], stream: Any, comm: str) -> None:
        self.group, self.size, self.rank = group, len(ranks), torch.distributed.get_rank(group)
        assert comm in ("p2p", "all_gather", "a2a")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, qkv_format: str, **options: Any) -> Tensor:
        assert all(tensor.is_contiguous() for tensor in (q, k, v))
        if qkv_format == "sbhd":
            borders = [i * len(q) * self.size for i in range(q.shape[1] + 1)]
            rows = [tensor.transpose(0, 1).flatten(0, 1) for tensor in (q, k, v)]
            out = self.attended(rows, borders, options["attn_mask_type"] == "causal", options["window_size"])
            return out.view(q.shape[1], len(q), -1).transpose(0, 1)
        assert options["attn_mask_type"].startswith("padding")
        assert options["cu_seqlens_q"] is options["cu_seqlens_kv_padded"]
        assert options["cu_seqlens_q"].dtype == torch.int32
        borders = options["cu_seqlens_q"].tolist()
        assert max(stop - start for start, stop in pairwise(borders)) <= options["max_seqlen_q"]
        return self.attended([q, k, v], borders, "causal" in options["attn_mask_type"], options["window_size"])

    def attended(self, rows: list[Tensor], borders: list[int], causal: bool, window: tuple[int, int]) -> Tensor:
        held = [[i for start, stop in pairwise(borders) for i in self.held(start, stop, rank)] for rank in range(self.size)]
        back = torch.tensor([i for part in held for i in part]).argsort()
        q, k, v = (torch.cat(all_gather(tensor, self.group))[back] for tensor in rows)
        k, v = (tensor.repeat_interleave(self.sizes[0] // self.sizes[1], dim=1) for tensor in (k, v))
        place = torch.arange(len(q))
        document = torch.searchsorted(torch.tensor(borders[1:]), place, right=True)
        before = place[:, None] - place[None]
        mask = document[:, None] == document[None]
        assert window[1] == (0 if causal else window[0])
        mask = mask & (before >= 0) if causal else mask
        mask = mask if window[0] < 0 else mask & (before <= window[0]) & (before >= -window[1])
        scores = torch.einsum("shd,thd->hst", q, k) / q.shape[-1] ** 0.5
        out = torch.einsum("hst,thd->shd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)
        return out[held[self.rank]].flatten(1)

    def held(self, start: int, stop: int, rank: int) -> list[int]:
        chunk = (stop - start) // (2 * self.size)
        numbers = (rank, 2 * self.size - 1 - rank)
        return [start + number * chunk + i for number in numbers for i in range(chunk)]


FORMS = {
    "causal": (Pattern(), "p2p"),
    "full": (Pattern(causal=False), "all_gather"),
    "window": (Pattern(window=5), "a2a"),
    "window both ways": (Pattern(causal=False, window=5), "all_gather"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize("form", FORMS)
def test_the_library_gets_what_its_documents_ask_for(form: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_context, "import_module", lambda name: SimpleNamespace(DotProductAttention=DotProductAttention))
    monkeypatch.setattr(te_context, "why_unavailable", lambda: None)
    monkeypatch.setattr(te_context, "_stream", lambda device: None)
    monkeypatch.setattr(te_context, "_DTYPES", (torch.float64,))
    pattern, comm = FORMS[form]
    tensors, borders = inputs(kv_heads=2), PACKED if packed else None

    def run() -> list[Tensor]:
        mesh = Mesh.create(Parallelism(cp=2, cp_comm=comm, cp_kernel="te"), device=torch.device("cpu"))  # type: ignore[arg-type]
        layout = SequenceLayout(S, S, 2, mesh.cp.rank, borders)
        core = CoreAttention(CausalAttention(dropout=0.0, mesh=mesh), dropout=0.0, mesh=mesh)
        assert not list(core.state_dict())
        index = layout.own_index(torch.device("cpu"))
        q, k, v, weights = (take(tensor, index).clone().requires_grad_() for tensor in tensors)
        sequence = SequenceContext(S // 2, S // 2, layout=layout, pattern=pattern)
        out = core(q, k, v, sequence).unflatten(2, q.shape[2:])
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v)), index]

    whole = [torch.empty_like(tensor) for tensor in (tensors[0], *tensors[:3])]
    for *parts, index in run_distributed(run, 2):
        for tensor, part in zip(whole, parts, strict=True):
            tensor[index.expand(B, -1).t(), torch.arange(B)] = part
    torch.testing.assert_close(whole, explicit(tensors, pattern, packed=packed), rtol=1e-12, atol=1e-12)


PADDED_DOCUMENT = SequenceLayout(64, 64, 2, 0, torch.tensor([[0, 64]]), real_lengths=torch.tensor([[60]]))


@pytest.mark.parametrize(
    ("comm", "layout", "pattern", "message"),
    [
        ("p2p", SequenceLayout(64, 64, 2), Pattern(window=5), "no sliding window with cp_comm='p2p'"),
        ("p2p", SequenceLayout(64, 60, 2), Pattern(causal=False), "rows of 60 tokens are padded to 64"),
        ("p2p", PADDED_DOCUMENT, Pattern(causal=False), "documents may end with padding"),
        ("a2a", SequenceLayout(64, 64, 8), Pattern(), "8 ranks exchange heads, and Transformer Engine does not share 8 and 2"),
    ],
)
def test_what_the_library_does_not_do_is_refused_by_name(
    comm: Any, layout: SequenceLayout, pattern: Pattern, message: str
) -> None:
    given = {"heads": 8, "kv_heads": 2, "dtype": torch.bfloat16, "window": pattern.window}
    assert message in str(te_context.why_not(comm, layout, pattern, **given))
    if layout is PADDED_DOCUMENT:
        assert te_context.why_not(comm, layout, Pattern(), **given) is None  # which a causal mask hides
    given["dtype"] = torch.float32
    assert "attends in 16 bits" in str(te_context.why_not(comm, layout, pattern, **given))


def test_without_the_library_the_kernel_is_refused_where_the_model_is_built() -> None:
    routes = ContextParallelAttention.of(Mesh(), BlockAttention())
    with pytest.raises(ValueError, match="cp_kernel='te' needs Transformer Engine: there is no CUDA device"):
        te_context.TeContextAttention(routes, dropout=0.0)
    with pytest.raises(ValueError, match="cp_kernel='flash' is unknown; use 'torch' or 'te'"):
        MegatronStrategy(cp_kernel="flash")  # type: ignore[arg-type]
