"""``GPT``: a decoder-only transformer that runs under any tensor- and pipeline-parallel layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.context_parallel.layout import SequenceLayout, document_of, end_borders
from lightning_megatron.context_parallel.tiles import Pattern
from lightning_megatron.initialize import materialize
from lightning_megatron.layers.attention import Attention, qkv_parts
from lightning_megatron.layers.autocast import without_autocast
from lightning_megatron.layers.backend import Backend, NormSpec
from lightning_megatron.layers.choice import current_backend
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.layers.mlp import gate_up_parts
from lightning_megatron.layers.position import PositionEmbedding
from lightning_megatron.layers.rope import Rope, RopeTables, WholeRows
from lightning_megatron.layers.sequence import SequenceContext, sequence_axis
from lightning_megatron.layers.transformer import TransformerLayer
from lightning_megatron.mesh import Mesh, current_mesh, inside_strategy
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.optim.guard import ForwardWait
from lightning_megatron.pipeline.model import PipelineModel
from lightning_megatron.sharding import Init
from lightning_megatron.tensor_parallel.chunked_loss import head_cross_entropy
from lightning_megatron.tensor_parallel.cross_entropy import gather_logits, vocab_parallel_cross_entropy
from lightning_megatron.tensor_parallel.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_logits

IGNORE_INDEX = -100


class GPT(PipelineModel):
    """A decoder-only transformer with a causal language-model head.

    ``model(tokens)`` returns logits ``[B, S, V]``. ``model(tokens, labels=labels)`` returns the loss of each token,
    ``[B, S]`` (fp32), without ever holding the full logits; it is 0 where the label is -100. Labels are given *shifted*:
    ``labels[:, t]`` is what position t should predict (``shift_labels`` makes them from tokens). Any S from 1 to
    ``max_seq_len`` works. Rows that hold several documents come with ``cu_seqlens``: attention, and positions, then stay
    inside each document.

    The layout is that of the ambient mesh (``current_mesh()``), read here and nowhere below. Inside a strategy's
    ``configure_model`` the parameters are made on the meta device and the strategy gives them values; elsewhere they get
    their first values at once. The model runs in the dtype of its parameters, also inside ``torch.autocast``.

    Args:
        config: sizes and options.
        seed: of the first values; ``torch.initial_seed()`` if not given. Not used inside a strategy.
        dtype: of the parameters.
        backend: what the layers are built of; if not given, what the strategy chose, and plain torch outside of one.

    Raises:
        ValueError: the layout does not fit the model.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
        backend: Backend | None = None,
    ) -> None:
        super().__init__()
        mesh = current_mesh()
        config.check_parallelism(mesh.parallelism)
        build = _Build(config, mesh, backend or current_backend(), torch.device("meta"), dtype)
        self.config = config
        self._mesh, self._sequence_axis = mesh, sequence_axis(mesh)
        self._rope = build.rope()
        self._whole_rows = None if self._rope is None else WholeRows(self._rope)
        self.embedding = build.embedding()
        self.position_embedding = build.position_embedding()
        self.embedding_dropout = Dropout(config.hidden_dropout, mesh=mesh)
        self.layers = nn.ModuleList(build.for_layer(index).layer() for index in range(config.num_layers))
        self.final_norm = build.final_norm()
        self.head = build.head()
        learned = ("position_embedding",) if config.position == "learned" else ()
        self.first_modules = ("embedding", *learned, "embedding_dropout")
        self.last_modules = ("final_norm", "embedding" if config.tied_embeddings else "head")
        self.last_cost = config.head_cost()
        if not inside_strategy():
            materialize(self, device=mesh.device, seed=torch.initial_seed() if seed is None else seed)

    def context(
        self,
        tokens: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        sequence_layout: SequenceLayout | None = None,
    ) -> tuple[SequenceContext]:
        """What layers need besides the hidden state, from tokens ``[B, S]``: lengths, documents and rotary tables.

        Args:
            tokens: whole rows; with a ``sequence_layout`` that cuts them, this rank's part.
            cu_seqlens: borders of the documents in each row, ``[B, n + 1]`` (or ``[n + 1]`` of a single row), from 0 to S.
            max_seqlen: length of the longest document, or an upper bound: saves time.
            sequence_layout: how rows lie over context-parallel ranks; a strategy gives it, documents included.

        Raises:
            ValueError: tokens are not ``[B, S]``, are not what the layout says, or S exceeds ``max_seq_len``.
        """
        layout = self._layout(tokens, cu_seqlens, max_seqlen, sequence_layout)
        seq_len = tokens.shape[1]
        padded_len = seq_len + -seq_len % self._sequence_axis.size
        tables = self._tables(tokens, layout, padded_len)
        pattern = Pattern(self.config.causal, self.config.sliding_window)
        return (SequenceContext(seq_len, padded_len, tables, layout, pattern),)

    def _layout(
        self, tokens: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, given: SequenceLayout | None
    ) -> SequenceLayout:
        if tokens.dim() != 2:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}; GPT takes [B, S].")
        num_rows, seq_len = tokens.shape
        if given is None:
            borders = None if cu_seqlens is None else end_borders(cu_seqlens, num_rows, seq_len)
            given = SequenceLayout(seq_len, seq_len, cu_seqlens=borders, max_document=max_seqlen)
        if seq_len != given.local_length:
            raise ValueError(
                f"{self._mesh.coordinate} tokens have {seq_len} positions, but this rank's part of the batch has "
                f"{given.local_length} (S={given.length} cut over cp={given.size}). A step under context parallelism must give "
                f"the model the tokens as they are in the batch; shift labels in the dataset, the collate function or "
                f"shard_batch, before the cut."
            )
        longest = given.num_real if given.cu_seqlens is None else given.max_document or 1
        if not 1 <= longest <= self.config.max_seq_len:
            raise ValueError(
                f"sequences of {longest} tokens do not fit 1 <= S <= max_seq_len={self.config.max_seq_len}; cut them, or raise "
                f"max_seq_len in the config."
            )
        return given

    def _positions(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """Positions of the tokens in their documents, padded as hidden states are: ``[1 or B, padded_len]``."""
        positions = layout.positions(layout.own_index(tokens.device))
        return F.pad(positions, (0, -tokens.shape[1] % self._sequence_axis.size))

    def _tables(self, tokens: Tensor, layout: SequenceLayout, padded_len: int) -> RopeTables | None:
        """``[padded_len, 1 or B, 1, head_dim]``."""
        if self._rope is None or self._whole_rows is None:
            return None
        if layout.size == 1 and layout.cu_seqlens is None:
            return self._whole_rows.tables(tokens.shape[1], padded_len, tokens.device)
        positions = self._positions(tokens, layout)
        flat = self._rope.tables(positions.t().flatten())
        shape = (positions.shape[1], positions.shape[0], 1, -1)
        return RopeTables(flat.cos.view(shape), flat.sin.view(shape))

    @without_autocast
    def first(
        self, tokens: Tensor, *, cu_seqlens: Tensor | None = None, sequence_layout: SequenceLayout | None = None
    ) -> Tensor:
        """Embed: ``[B, S] -> [S/tp, B, H]`` under sequence parallelism (S padded to a multiple of tp), else ``[S, B, H]``."""
        # Padding stands at the end, where causal attention lets no real token see it.
        padded = F.pad(tokens, (0, -tokens.shape[1] % self._sequence_axis.size))
        hidden: Tensor = self.embedding(padded)
        if self.position_embedding is not None:
            layout = self._layout(tokens, cu_seqlens, None, sequence_layout)
            hidden = hidden + self.position_embedding(self._positions(tokens, layout))
        dropped: Tensor = self.embedding_dropout(hidden)
        return dropped

    @without_autocast
    def last(self, hidden: Tensor, context: SequenceContext, labels: Tensor | None = None) -> Tensor:
        """Head and loss: ``[S/tp, B, H]`` (or ``[S, B, H]``) to losses ``[B, S]``, or to logits ``[B, S, V]`` without labels.

        Raises:
            ValueError: labels have another shape than tokens.
        """
        config, tp = self.config, self._mesh.tp
        hidden = self.final_norm(hidden)
        if labels is None:
            return gather_logits(self._logits(hidden)[: context.seq_len], tp=tp, vocab_size=config.vocab_size)
        if tuple(labels.shape) != (hidden.shape[1], context.seq_len):
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, tokens {(hidden.shape[1], context.seq_len)}: give one each."
            )
        # The labels are padded, not the logits cut: the backward of a cut would copy the largest tensor of the model.
        padded = F.pad(labels, (0, context.padded_len - context.seq_len), value=IGNORE_INDEX)
        options: dict[str, Any] = {"label_smoothing": config.label_smoothing, "z_loss": config.z_loss}
        options |= {"vocab_size": config.vocab_size, "ignore_index": IGNORE_INDEX}
        if self.head is None or config.loss_chunks > 1 or _is_plain(self.head):
            options |= {"mesh": self._mesh, "num_chunks": config.loss_chunks}
            losses = head_cross_entropy(hidden, self._head_weight(), padded.t(), **options)
        else:
            losses = vocab_parallel_cross_entropy(self._logits(hidden), padded.t(), tp=tp, reuse_logits=True, **options)
        return losses.t()[:, : context.seq_len]

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.head is None:
            return vocab_logits(hidden, self._head_weight(), self._mesh)
        logits: Tensor = self.head(hidden)
        return logits

    def _head_weight(self) -> Tensor:
        """The weight ``[V_padded/tp, H]``, complete: its module is not called, so what waits before that call waits here."""
        owner = self.embedding if self.head is None else self.head
        for hook in owner._forward_pre_hooks.values():
            if isinstance(hook, ForwardWait):
                hook(owner, ())
        return owner.weight


def _is_plain(head: nn.Module) -> bool:
    """Whether a head is a product with its weight and nothing else: nobody has changed it, nor wants to see its logits."""
    hooks = [head._forward_hooks, head._backward_hooks, head._backward_pre_hooks]
    seen = any(hooks) or any(not isinstance(hook, ForwardWait) for hook in head._forward_pre_hooks.values())
    return type(head) is VocabParallelHead and "forward" not in vars(head) and not seen


def shift_labels(tokens: Tensor, ignore_index: int = IGNORE_INDEX, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Next-token labels, ``[B, S] -> [B, S]``: position t gets token t + 1, the last position ``ignore_index``.

    With ``cu_seqlens`` (see ``GPT.context``) the last position of each document gets it too.
    """
    labels = F.pad(tokens[:, 1:], (0, 1), value=ignore_index)
    if cu_seqlens is None:
        return labels
    borders = end_borders(cu_seqlens, *tokens.shape)
    document = document_of(borders, torch.arange(tokens.shape[1], device=tokens.device)[None])
    is_last = F.pad(document[:, 1:] != document[:, :-1], (0, 1), value=True)
    return labels.masked_fill(is_last, ignore_index)


@dataclass(frozen=True)
class _Build:
    """Makes the parts of one model."""

    config: GPTConfig
    mesh: Mesh
    backend: Backend
    device: torch.device
    dtype: torch.dtype

    def for_layer(self, index: int) -> _Build:
        """What makes the layer of that index."""
        return replace(self, backend=self.backend.for_layer(index, self.config.num_layers))

    @property
    def _norm(self) -> NormSpec:
        return NormSpec(self.config.norm, self.config.norm_eps)

    @property
    def _init(self) -> Init:
        return Init("normal", self.config.init_std)

    @property
    def _residual_init(self) -> Init:
        """Smaller, so that the sum of all blocks' outputs keeps its size at any depth (Radford et al. 2019, section 2.3)."""
        return Init("normal", self.config.init_std / sqrt(2 * self.config.num_layers))

    def rope(self) -> Rope | None:
        config = self.config
        if config.position != "rope":
            return None
        return Rope(head_dim=config.head_size, theta=config.rope_theta, scaling=config.rope_scaling)

    def embedding(self) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(
            self.config.vocab_size,
            self.config.hidden_size,
            mesh=self.mesh,
            vocab_multiple=self.config.vocab_multiple,
            init=self._init,
            device=self.device,
            dtype=self.dtype,
        )

    def position_embedding(self) -> PositionEmbedding | None:
        config = self.config
        if config.position != "learned":
            return None
        return PositionEmbedding(
            config.max_seq_len,
            config.hidden_size,
            mesh=self.mesh,
            init=self._init,
            device=self.device,
            dtype=self.dtype,
        )

    def head(self) -> VocabParallelHead | None:
        if self.config.tied_embeddings:
            return None
        return self.backend.head(
            self.config.vocab_size,
            self.config.hidden_size,
            mesh=self.mesh,
            vocab_multiple=self.config.vocab_multiple,
            init=self._init,
            device=self.device,
            dtype=self.dtype,
        )

    def final_norm(self) -> nn.Module:
        partial = self.mesh.sequence_parallel
        return self.backend.norm(self.config.hidden_size, self._norm, partial=partial, device=self.device, dtype=self.dtype)

    def layer(self) -> TransformerLayer:
        attn_norm, attn = self._attention()
        mlp_norm, mlp = self._mlp()
        dropout = self.config.hidden_dropout
        return TransformerLayer(attn_norm, attn, mlp_norm=mlp_norm, mlp=mlp, mesh=self.mesh, dropout=dropout)

    def _attention(self) -> tuple[nn.Module, Attention]:
        config, mesh = self.config, self.mesh
        parts = qkv_parts(config.num_heads, config.kv_heads, head_dim=config.head_size, tp=mesh.tp.size)
        norm, qkv = self.backend.norm_column_linear(
            config.hidden_size,
            parts,
            norm=self._norm,
            mesh=mesh,
            bias=config.has_qkv_bias,
            init=self._init,
            device=self.device,
            dtype=self.dtype,
        )
        out = self._row_linear(config.num_heads * config.head_size)
        core = self.backend.core_attention(dropout=config.attention_dropout, mesh=mesh)
        q_norm, k_norm = self._head_norm(), self._head_norm()
        head_dim = config.head_size
        return norm, Attention(qkv, out, core=core, backend=self.backend, head_dim=head_dim, q_norm=q_norm, k_norm=k_norm)

    def _head_norm(self) -> nn.Module | None:
        """Each tp rank normalises other heads, with sequence parallelism or without: the gradient is always partial."""
        if not self.config.qk_norm:
            return None
        return self.backend.norm(self.config.head_size, self._norm, partial=True, device=self.device, dtype=self.dtype)

    def _mlp(self) -> tuple[nn.Module, nn.Module]:
        config = self.config
        gated = config.activation == "swiglu"
        norm, up = self.backend.norm_column_linear(
            config.hidden_size,
            gate_up_parts(config.ffn_size) if gated else config.ffn_size,
            norm=self._norm,
            mesh=self.mesh,
            bias=config.bias,
            init=self._init,
            device=self.device,
            dtype=self.dtype,
        )
        down = self._row_linear(config.ffn_size)
        return norm, self.backend.mlp(up, down, config.activation)

    def _row_linear(self, in_features: int) -> nn.Module:
        return self.backend.row_linear(
            in_features,
            self.config.hidden_size,
            mesh=self.mesh,
            bias=self.config.bias,
            init=self._residual_init,
            device=self.device,
            dtype=self.dtype,
        )
