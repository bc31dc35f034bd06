"""Where the GPU time of a profiled step goes, by kind of kernel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

# The first pattern that a kernel's name matches says what it is.
_KINDS = (
    ("attention", r"fmha|flash|sdpa|convert_dq|dot_do"),
    ("communication", r"nccl"),
    ("optimizer", r"adam|_squares|segment_reduce|lpnorm|norm_reduce|narrow_mains"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|wgmma|matmul|cublas|splitk|^gated_|^rotated_|^plain_turned|^weight_gradient"),
    ("cross entropy", r"cross_entropy|held_losses"),
    ("activation", r"swiglu|silu|gelu"),
    ("norm", r"norm|rms"),
    ("rope", r"rotate|rope"),
    ("FP8 casts", r"quant|amax|fp8|narrow|transpose"),
    ("embedding", r"sorted_rows|embedding|index|gather_kernel|sort|radix"),
    ("copy, fill", r"memcpy|memset|copy|fill|catarray"),
)
_OTHER = "other pointwise"
_ANNOTATIONS = ("ProfilerStep#", "Optimizer.")
# What torch's kernels are called by before their names say anything.
_BOILERPLATE = re.compile(r"^void |at::native::|at::|\(anonymous namespace\)::|c10::")

Span = tuple[str, float, float]


def table_of(profile: Any, *, longest: int = 16, of_kind: int = 3) -> str:
    """Milliseconds by kind and each kind's longest kernels, the time in which no kernel ran, the longest kernels and gaps.

    Args:
        profile: a ``torch.profiler.profile`` of one step, with CUDA activity.
        longest: how many kernels to name.
        of_kind: how many kernels of each kind to name.
    """
    spans = kernel_spans(profile)
    if not spans:
        return "no kernel was recorded"
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    kind_of: dict[str, str] = {}
    for name, start, end in spans:
        kinds[_kind(name)] += (end - start) / 1e3
        kind_of.setdefault(name[:100], _kind(name))
        names[name[:100]] += (end - start) / 1e3
        counts[name[:100]] += 1
    whole = max(end for *_, end in spans) - min(start for _, start, _ in spans)
    busy, gaps = _busy_and_gaps(spans)
    rows = []
    for kind, time in kinds.most_common():
        rows.append(f"{kind:16s} {time:9.2f} ms {1e5 * time / whole:5.1f} %")
        mine = [name for name, _ in names.most_common() if kind_of[name] == kind]
        rows += _named(mine[:of_kind], names, counts)
    rows.append(f"{'idle':16s} {(whole - busy) / 1e3:9.2f} ms {100 * (1 - busy / whole):5.1f} %   of {whole / 1e3:.2f} ms")
    rows += _named([name for name, _ in names.most_common(longest)], names, counts)
    rows += [f"  {time:8.2f} ms idle between {where}" for time, where in sorted(gaps, reverse=True)[:8]]
    rows.append(f"  {sum(time for time, _ in gaps if 0 < time < 0.05):8.2f} ms idle in gaps below 0.05 ms")
    return "\n".join(rows)


def kernel_spans(profile: Any) -> list[Span]:
    """Name, start and end in microseconds of each kernel and copy on the device."""
    return [
        (_BOILERPLATE.sub("", event.name), event.time_range.start, event.time_range.end)
        for event in profile.events()
        if "cuda" in str(event.device_type).lower() and event.time_range.elapsed_us() > 0 and not _is_annotation(event)
    ]


def _is_annotation(event: Any) -> bool:
    """Whether a span on the device's line is a range that somebody named, not a kernel (whose name may hold a ``#``)."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(_ANNOTATIONS)


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name.lower())), _OTHER)


def _named(chosen: Iterable[str], names: Counter[str], counts: Counter[str]) -> list[str]:
    return [f"  {names[name]:8.2f} ms {counts[name]:5d} x {name}" for name in chosen]


def _busy_and_gaps(spans: list[Span]) -> tuple[float, list[tuple[float, str]]]:
    """Microseconds in which something ran, and the milliseconds between what ended last and what began next."""
    busy, edge, before = 0.0, min(start for _, start, _ in spans), ""
    gaps: list[tuple[float, str]] = []
    for start, end, name in sorted((start, end, name) for name, start, end in spans):
        gaps.append(((start - edge) / 1e3, f"{before[:50]} -> {name[:50]}"))
        busy = busy + max(0.0, end - max(start, edge))
        edge, before = max(edge, end), name
    return busy, gaps
