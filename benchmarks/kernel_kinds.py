"""Where the GPU time of a profiled step goes, by kind of kernel."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

# The first pattern that a kernel's name matches says what it is.
_KINDS = (
    ("attention", r"fmha|flash|sdpa|convert_dq|dot_do"),
    ("communication", r"nccl"),
    ("optimizer", r"adam|sum_of_squares|lpnorm|norm_reduce"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|wgmma|matmul|cublas|splitk"),
    ("cross entropy", r"cross_entropy"),
    ("activation", r"swiglu|silu|gelu"),
    ("norm", r"norm|rms"),
    ("rope", r"rotate|rope"),
    ("FP8 casts", r"quant|amax|fp8|narrow|transpose"),
    ("embedding", r"sorted_rows|embedding|index|sort|radix"),
    ("copy, fill", r"memcpy|memset|copy|fill|cat"),
)


def table_of(profile: Any, *, longest: int = 16) -> str:
    """Milliseconds by kind, the time in which no kernel ran, the longest kernels and the longest gaps.

    Args:
        profile: a ``torch.profiler.profile`` of one step, with CUDA activity.
        longest: how many kernels to name.
    """
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if "cuda" in str(event.device_type).lower() and event.time_range.elapsed_us() > 0 and "#" not in event.name
    ]
    if not spans:
        return "no kernel was recorded"
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, start, end in spans:
        kind = next((kind for kind, pattern in _KINDS if re.search(pattern, name.lower())), "other pointwise")
        kinds[kind] += (end - start) / 1e3
        names[name[:100]] += (end - start) / 1e3
        counts[name[:100]] += 1
    busy, edge, before = 0.0, min(start for _, start, _ in spans), ""
    whole = max(end for *_, end in spans) - edge
    gaps: list[tuple[float, str]] = []
    for start, end, name in sorted((start, end, name) for name, start, end in spans):
        gaps.append(((start - edge) / 1e3, f"{before[:50]} -> {name[:50]}"))
        busy = busy + max(0.0, end - max(start, edge))
        edge, before = max(edge, end), name
    rows = [f"{kind:16s} {time:9.2f} ms {1e5 * time / whole:5.1f} %" for kind, time in kinds.most_common()]
    rows.append(f"{'idle':16s} {(whole - busy) / 1e3:9.2f} ms {100 * (1 - busy / whole):5.1f} %   of {whole / 1e3:.2f} ms")
    rows += [f"  {time:8.2f} ms {counts[name]:5d} x {name}" for name, time in names.most_common(longest)]
    rows += [f"  {time:8.2f} ms idle between {where}" for time, where in sorted(gaps, reverse=True)[:8]]
    rows.append(f"  {sum(time for time, _ in gaps if 0 < time < 0.05):8.2f} ms idle in gaps below 0.05 ms")
    return "\n".join(rows)
