"""The table that a profiled step of the benchmarks ends with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.kernel_kinds import table_of


def event(name: str, start: float, end: float, *, device: str = "DeviceType.CUDA", annotates: bool = False) -> Any:
    """Times in microseconds."""
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=annotates)


def rows_of(*events: Any) -> list[str]:
    return table_of(SimpleNamespace(events=lambda: list(events))).splitlines()


def test_kinds_are_followed_by_their_longest_kernels_and_the_time_between() -> None:
    products = [event(f"nvjet_{size}", 100.0 * size, 100.0 * size + 20.0 + size) for size in range(4)]
    rows = rows_of(*products, event("aten::mm", 0.0, 900.0, device="DeviceType.CPU"))
    assert [row.split()[0] for row in rows[:5]] == ["GEMM", "0.02", "0.02", "0.02", "idle"]
    assert [row.split()[-1] for row in rows[1:4]] == ["nvjet_3", "nvjet_2", "nvjet_1"]
    assert rows[0].split()[1:3] == ["0.09", "ms"]
    assert rows[4].split()[1] == "0.24"  # of 323 microseconds, 86 of which were busy


def test_a_kernel_that_torch_wrote_as_a_lambda_is_no_gap() -> None:
    name = (
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}"
    )
    named = event("Optimizer.step#AdamW.step", 0.0, 1000.0, annotates=True)
    rows = rows_of(named, event("_adam", 0.0, 300.0), event(name, 300.0, 900.0), event("_adam", 900.0, 1000.0))
    assert rows[0].split() == ["copy,", "fill", "0.60", "ms", "60.0", "%"]
    assert rows[1].endswith("1 x elementwise_kernel<128, 4, direct_copy_kernel_cuda(TensorIteratorBase&)::{lambda()#3}")
    assert next(row for row in rows if row.startswith("idle")).split()[1] == "0.00"
    assert not any("Optimizer" in row for row in rows)


def test_own_products_are_products_and_what_is_left_apart_is_not() -> None:
    products = ("gated_forward", "gated_narrow_forward", "rotated_128", "plain_turned", "weight_gradient")
    apart = {"_rotate_heads": "rope", "_swiglu_backward": "activation", "held_losses": "cross"}
    rows = rows_of(*(event(name, 10.0 * place, 10.0 * place + 5.0) for place, name in enumerate((*products, *apart))))
    assert {row.split()[0] for row in rows if row[0] != " "} == {"GEMM", "idle", *apart.values()}
    assert next(row for row in rows if row.startswith("GEMM")).split()[1] == "0.03"  # 25 microseconds
