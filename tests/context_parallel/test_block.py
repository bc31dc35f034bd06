"""Tiles by plain torch and by flash-attn, a stand-in for which computes in fp64 and takes what the package takes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron import MegatronStrategy
from lightning_megatron.context_parallel import block as block_file
from lightning_megatron.context_parallel.block import BlockAttention
from lightning_megatron.context_parallel.flash import PackageFlash, flash_backward, flash_forward
from lightning_megatron.context_parallel.tiles import Lengths, Tile
from lightning_megatron.layers.choice import choose_backend
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.te_backend import Fp8Options
from lightning_megatron.layers.torch_backend import CausalAttention, TorchBackend
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPT, GPTConfig

NAME = "flash_attn.flash_attn_interface"
WHOLE: Any = slice(None)


def scores_of(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int) -> Tensor:
    """Of one sequence, ``[n, h, d]`` and ``[m, g, d]``; the diagonal ends in the lower right corner."""
    scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)) * scale
    ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    right = 0 if causal else right
    hidden = (ahead > right) & (right >= 0) | (-ahead > left) & (left >= 0)
    return scores.masked_fill(hidden, float("-inf"))


def one_forward(q: Tensor, k: Tensor, v: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
    scores = scores_of(q, k, *where)
    lse = scores.logsumexp(-1)
    sees = lse.isfinite()
    weights = (scores - lse.where(sees, 0.0)[..., None]).exp()
    out = torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))
    return out, lse.where(sees, float("inf"))


def one_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *where: Any) -> tuple[Tensor, ...]:
    groups, scale = q.shape[1] // k.shape[1], where[0]
    weights = (scores_of(q, k, *where) - lse.where(lse.isfinite(), 0.0)[..., None]).exp()
    of_weights = torch.einsum("nhd,mhd->hnm", grad, v.repeat_interleave(groups, dim=1))
    of_scores = weights * (of_weights - (grad * out).sum(-1).t()[..., None]) * scale
    of_q = torch.einsum("hnm,mhd->nhd", of_scores, k.repeat_interleave(groups, dim=1))
    of_k, of_v = torch.einsum("hnm,nhd->mhd", of_scores, q), torch.einsum("hnm,nhd->mhd", weights, grad)
    return of_q, of_k.unflatten(1, (-1, groups)).sum(2), of_v.unflatten(1, (-1, groups)).sum(2)


class Package(ModuleType):
    """What this project uses of ``flash_attn.flash_attn_interface``, with the names of its parameters."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.calls: list[str] = []

    def _flash_attn_forward(
        self,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    ):
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
        self.calls.append("forward")
        where = softmax_scale, causal, window_size_left, window_size_right
        made = [one_forward(*parts, *where) for parts in zip(q, k, v, strict=True)]
        return torch.stack([out for out, _ in made]), torch.stack([lse for _, lse in made]), None, torch.zeros(2)

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, return_softmax,
    ):  # fmt: skip
        self.calls.append("varlen forward")
        where = softmax_scale, causal, window_size_left, window_size_right
        made = [one_forward(q[a], k[b], v[b], *where) for a, b in self._documents(cu_seqlens_q, cu_seqlens_k)]
        assert max(len(out) for out, _ in made) <= max_seqlen_q
        return torch.cat([out for out, _ in made]), torch.cat([lse for _, lse in made], dim=1), None, torch.zeros(2)

    def _flash_attn_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    ):  # fmt: skip
        assert rng_state.shape == (2,)
        self.calls.append("backward")
        where = softmax_scale, causal, window_size_left, window_size_right
        for row in range(len(q)):
            made = one_backward(dout[row], q[row], k[row], v[row], out[row], softmax_lse[row], *where)
            for place, value in zip((dq, dk, dv), made, strict=True):
                place[row] = value

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    ):  # fmt: skip
        self.calls.append("varlen backward")
        where = softmax_scale, causal, window_size_left, window_size_right
        for a, b in self._documents(cu_seqlens_q, cu_seqlens_k):
            made = one_backward(dout[a], q[a], k[b], v[b], out[a], softmax_lse[:, a], *where)
            dq[a], dk[b], dv[b] = made

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False):
        self.calls.append("func")
        where = q.shape[-1] ** -0.5, causal, -1, -1
        return torch.stack([one_forward(*parts, *where)[0] for parts in zip(q, k, v, strict=True)])

    @staticmethod
    def _documents(cu_q: Tensor, cu_k: Tensor) -> list[tuple[slice, slice]]:
        borders = zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)
        return [(slice(int(a), int(b)), slice(int(c), int(d))) for a, b, c, d in borders]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, NAME, made)
    return made


def lengths(*borders: list[int]) -> Lengths:
    cu_q, cu_k = (torch.tensor(each, dtype=torch.int32) for each in borders)
    return Lengths(cu_q, cu_k, int(cu_q.diff().max()), int(cu_k.diff().max()))


TILES = {
    "full": Tile(WHOLE, WHOLE),
    "causal": Tile(WHOLE, WHOLE, right=0),
    "band": Tile(WHOLE, WHOLE, left=3, right=1),
    "bounded on one side, some queries without keys": Tile(WHOLE, WHOLE, left=2, right=None),
    "packed": Tile(WHOLE, WHOLE, right=0, lengths=lengths([0, 5, 10, 20], [0, 9, 12, 24])),
    "packed bands": Tile(WHOLE, WHOLE, left=2, right=0, lengths=lengths([0, 5, 10, 20], [0, 9, 12, 24])),
}


@pytest.mark.parametrize("name", TILES)
def test_tiles_by_the_package_are_those_of_plain_torch(package: Package, name: str) -> None:
    torch.manual_seed(0)
    tile, block = TILES[name], BlockAttention(kernel="math")
    q, grad = (torch.randn(10, 2, 4, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(12, 2, 2, 8, dtype=torch.float64) for _ in range(2))
    expected, expected_lse, state = block.forward(q, k, v, tile)
    out, lse, random = flash_forward(q, k, v, tile, dropout=0.0, calls=PackageFlash())
    assert_close(out, expected.float())
    assert_close(lse, expected_lse)
    kept: dict[str, Any] = {"out": expected, "lse": expected_lse}
    found = flash_backward(grad, (q, k, v), tile, **kept, random=random, dropout=0.0, calls=PackageFlash())
    for mine, theirs in zip(found, block.backward(grad, q, k, v, **kept, tile=tile, random=state), strict=True):
        assert_close(mine, theirs)
    assert package.calls == (["varlen forward", "varlen backward"] if "packed" in name else ["forward", "backward"])


@pytest.mark.parametrize("name", TILES)
def test_runs_of_queries_in_plain_torch_are_as_all_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torch.manual_seed(0)
    q, grad = (torch.randn(10, 2, 4, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(12, 2, 2, 8, dtype=torch.float64) for _ in range(2))
    tile, block, found = TILES[name], BlockAttention(kernel="math"), []
    for most in (2**26, 300):  # three queries of 96 scores each
        monkeypatch.setattr(block_file, "_MAX_SCORES", most)
        out, lse, state = block.forward(q, k, v, tile)
        found.append([out, lse, *block.backward(grad, q, k, v, out=out, lse=lse, tile=tile, random=state)])
    assert_close(found[1], found[0])


def test_a_model_attends_by_the_package(package: Package) -> None:
    config = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, vocab_size=64, max_seq_len=16)
    tokens = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(0))
    found = []
    for kernel in ("auto", "flash_attn"):
        model = GPT(config, seed=0, backend=TorchBackend(attention_kernel=kernel))
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
        loss.backward()
        found.append([loss, *(param.grad for param in model.parameters())])
    assert_close(found[1], found[0])
    assert package.calls == ["func", "func"]


@pytest.mark.parametrize(("mode", "insists"), [("default", False), ("warn", False), ("error", True)])
def test_order_is_asked_for_only_where_torch_insists(package: Package, mode: str, insists: bool) -> None:
    before = torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode(mode)
        q = torch.randn(4, 1, 2, 8)
        attend, asked = package.flash_attn_func, []
        package.flash_attn_func = lambda *args, **kwargs: asked.append(kwargs["deterministic"]) or attend(*args, **kwargs)
        CausalAttention(dropout=0.0, mesh=Mesh(), kernel="flash_attn")(q, q, q, SequenceContext(4, 4))
    finally:
        torch.set_deterministic_debug_mode(before)
    assert asked == [insists]


def test_a_kernel_that_cannot_run_here_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="attention_kernel='fast' is unknown; use one of auto, math, flash, flash_attn, cudnn"):
        MegatronStrategy(attention_kernel="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention_kernel='cudnn' is for 16 bits on a GPU, but the model is torch"):
        choose_backend("torch", device=torch.device("cpu"), dtype=torch.bfloat16, attention_kernel="cudnn")
    gpu: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "attention_kernel": "flash_attn"}
    with pytest.raises(ValueError, match="attention_kernel='flash_attn' is for attention in 16 bits, but fp8_attention=True"):
        choose_backend("auto", **gpu, fp8=Fp8Options(attention=True))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(ValueError, match="needs the package flash-attn, which cannot be imported"):
        choose_backend("torch", **gpu)
