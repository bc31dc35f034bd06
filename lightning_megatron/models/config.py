"""``GPTConfig``: a decoder-only transformer as pure data, with its exact sizes and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_megatron.context_parallel.attention import check_exchanged_heads
from lightning_megatron.layers.attention import check_heads
from lightning_megatron.layers.mlp import check_ffn
from lightning_megatron.layers.rope import RopeScaling
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.partition import layers_of_stages


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and options of a decoder-only transformer (GPT-2, Llama and kin).

    Args:
        num_layers: transformer layers.
        hidden_size: H.
        num_heads: query heads.
        vocab_size: V, without padding.
        max_seq_len: longest sequence, in tokens.
        num_kv_heads: key/value heads (grouped-query attention); as many as query heads if not given.
        ffn_hidden_size: width of the feed-forward block; ``4 * hidden_size`` if not given.
        head_dim: size of a head; ``hidden_size / num_heads`` if not given.
        position: rotary embeddings, or a learned table of ``max_seq_len`` vectors.
        rope_theta: base of the rotary frequencies.
        rope_scaling: stretching of the rotary frequencies to longer contexts.
        norm: normalisation before each block and before the head.
        norm_eps: its epsilon.
        activation: ``swiglu`` (gated) or ``gelu`` (tanh approximation).
        bias: biases on linear layers.
        qkv_bias: bias on the QKV projection; as ``bias`` if not given.
        tied_embeddings: the head uses the embedding's weight.
        hidden_dropout: dropout of embeddings and of each block's output.
        attention_dropout: dropout of attention weights.
        causal: a token attends to itself and those before it; otherwise to all of its document.
        sliding_window: a token attends only to those fewer than this many tokens away, itself included.
        qk_norm: normalise queries and keys, a head at a time, before the rotation.
        label_smoothing: share of the target spread over the vocabulary.
        z_loss: weight of the squared log-sum-exp in the loss.
        loss_chunks: make logits and losses of this many chunks of tokens in turn, and again in the backward, so that the
            logits of all tokens are never held. The head costs a third more.
        init_std: standard deviation of first weights; of those that write to the residual stream, divided by
            ``sqrt(2 * num_layers)``.
        vocab_multiple: the vocabulary is padded to a multiple of this and of tp (padding is never saved or counted).

    Raises:
        ValueError: sizes that do not fit together.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    max_seq_len: int
    num_kv_heads: int | None = None
    ffn_hidden_size: int | None = None
    head_dim: int | None = None
    position: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Literal["swiglu", "gelu"] = "swiglu"
    bias: bool = False
    qkv_bias: bool | None = None
    tied_embeddings: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    causal: bool = True
    sliding_window: int | None = None
    qk_norm: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_chunks: int = 1
    init_std: float = 0.02
    vocab_multiple: int = 128

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_options()
        check_heads(self.num_heads, self.kv_heads, 1)
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} does not divide by num_heads={self.num_heads}; change one of them, or give "
                f"head_dim."
            )
        if self.position == "rope" and self.head_size % 2:
            raise ValueError(f"head_dim={self.head_size} is odd: rotary embeddings turn pairs; make it even.")

    def _check_sizes(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_seq_len", "vocab_multiple", "loss_chunks"):
            _check_size(name, getattr(self, name))
        for name in ("num_kv_heads", "ffn_hidden_size", "head_dim", "sliding_window"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))

    def _check_options(self) -> None:
        choices = {"position": ("rope", "learned"), "norm": ("rmsnorm", "layernorm"), "activation": ("swiglu", "gelu")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {allowed}.")
        for name in ("hidden_dropout", "attention_dropout", "label_smoothing"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1.")
        for name in ("z_loss", "init_std", "norm_eps"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
        if self.rope_theta <= 0.0:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 0.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GPTConfig:
        """The config with these fields, as ``dataclasses.asdict`` writes them (``rope_scaling`` may be a dict as well).

        Raises:
            ValueError: a key is no field.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"{unknown} are not fields of GPTConfig; the fields are {known}.")
        scaling = values.get("rope_scaling")
        if isinstance(scaling, Mapping):
            values = {**values, "rope_scaling": RopeScaling(**scaling)}
        return cls(**values)

    @property
    def kv_heads(self) -> int:
        """Key/value heads, resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of a head, resolved."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward block, resolved."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the QKV projection has a bias, resolved."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    def check_parallelism(self, parallelism: Parallelism) -> None:
        """Refuse a layout that the model cannot be cut to. Pure: no process group is needed.

        Raises:
            ValueError: tp does not divide heads or feed-forward width, cp ranks that exchange heads do not divide those, or
                there are fewer layers than pipeline stages; with the numbers, the rule and the fix.
        """
        check_heads(self.num_heads, self.kv_heads, parallelism.tp)
        check_ffn(self.ffn_size, parallelism.tp)
        if parallelism.pp > 1 and parallelism.pipeline_layout is not None:
            layers_of_stages(self.num_layers, parallelism.num_stages, parallelism.pipeline_layout, last_cost=self.head_cost())
        elif self.num_layers < parallelism.num_stages:
            raise ValueError(
                f"num_layers={self.num_layers} is less than the pp({parallelism.pp}) * vpp({parallelism.vpp}) = "
                f"{parallelism.num_stages} pipeline stages, and each needs a layer; lower pp or vpp, or add layers; a "
                f"pipeline_layout may have zeros."
            )
        if parallelism.num_exchanging > 1:
            kv_heads = max(1, self.kv_heads // parallelism.tp)
            check_exchanged_heads(self.num_heads // parallelism.tp, kv_heads, parallelism.num_exchanging)

    def num_parameters(self) -> int:
        """Parameters of the whole model: vocabulary padding not counted, a tied weight counted once."""
        hidden, attn_size = self.hidden_size, self.num_heads * self.head_size
        qkv_size = attn_size + 2 * self.kv_heads * self.head_size
        up_size = self._num_up_matrices * self.ffn_size
        norm = hidden * self._norm_tensors
        layer = hidden * (qkv_size + attn_size + up_size + self.ffn_size) + 2 * norm
        layer += qkv_size * self.has_qkv_bias + (hidden + up_size + hidden) * self.bias
        layer += 2 * self.head_size * self._norm_tensors * self.qk_norm
        positions = self.max_seq_len * hidden * (self.position == "learned")
        matrices = 1 if self.tied_embeddings else 2
        return matrices * self.vocab_size * hidden + positions + self.num_layers * layer + norm

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs a token, forward and backward, at sequences of ``seq_len`` tokens; recompute not counted.

        Six for each weight that a token multiplies (head included, embedding look-up not), and causal attention at half of
        the full square: ``6 * layers * heads * head_dim * seq_len``.
        """
        return self.num_layers * self._layer_flops(seq_len) + 6 * self.hidden_size * self.vocab_size

    def head_cost(self) -> float:
        """FLOPs of the head over those of a layer, at sequences of ``max_seq_len``. The embedding costs next to nothing."""
        return 6 * self.hidden_size * self.vocab_size / self._layer_flops(self.max_seq_len)

    def _layer_flops(self, seq_len: int) -> int:
        attn_size = self.num_heads * self.head_size
        attn = self.hidden_size * (2 * attn_size + 2 * self.kv_heads * self.head_size)
        mlp = self.hidden_size * self.ffn_size * (self._num_up_matrices + 1)
        return 6 * (attn + mlp) + 6 * attn_size * seq_len

    @property
    def _num_up_matrices(self) -> int:
        return 2 if self.activation == "swiglu" else 1

    @property
    def _norm_tensors(self) -> int:
        return 2 if self.norm == "layernorm" else 1


def _check_size(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name}={size!r} is not a size: give a whole number of 1 or more.")
