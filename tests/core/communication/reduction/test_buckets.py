"""The plan of buckets: order, sizes, one dtype and device each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_core.communication.reduction.bucket_buffer import TAIL_ELEMENTS, Bucket
from bagua_core.communication.reduction.buckets import GradientSpec, carries_tail, plan_buckets

CPU, META = torch.device("cpu"), torch.device("meta")


def fp32(*elements: int) -> list[GradientSpec]:
    return [GradientSpec(n, torch.float32, CPU) for n in elements]


def test_backward_order_and_a_small_first_bucket() -> None:
    plan = plan_buckets(fp32(10, 10, 10, 10, 10), bucket_cap_bytes=80, first_bucket_bytes=40)
    assert [b.members for b in plan] == [(4,), (3, 2), (1, 0)]
    assert [b.offsets for b in plan] == [(0,), (0, 10), (0, 10)]
    assert [b.elements for b in plan] == [10, 20, 20]


def test_a_cap_smaller_than_the_first_bucket_holds_for_it_too() -> None:
    assert len(plan_buckets(fp32(1, 1), bucket_cap_bytes=4, first_bucket_bytes=1000)) == 2


def test_kinds_do_not_mix_and_leave_as_they_fill() -> None:
    kinds = [
        GradientSpec(4, torch.float32, CPU),
        GradientSpec(4, torch.float16, CPU),
        GradientSpec(4, torch.float32, META),
        GradientSpec(4, torch.float32, CPU),
    ]
    plan = plan_buckets(kinds)
    assert [(b.dtype, b.device, b.members) for b in plan] == [
        (torch.float32, META, (2,)),
        (torch.float16, CPU, (1,)),
        (torch.float32, CPU, (3, 0)),
    ]
    assert [carries_tail(b) for b in plan] == [False, False, True]


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from([torch.float32, torch.float16, torch.float64])),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 200),
    st.integers(1, 200),
)
def test_every_gradient_is_in_one_bucket(
    kinds: list[tuple[int, torch.dtype]], cap_bytes: int, first_bytes: int
) -> None:
    specs = [GradientSpec(n, dtype, CPU) for n, dtype in kinds]
    plan = plan_buckets(specs, cap_bytes, first_bytes)
    assert sorted(i for b in plan for i in b.members) == list(range(len(specs)))
    for bucket in plan:
        assert list(bucket.members) == sorted(bucket.members, reverse=True)
        sizes = [specs[i].size_bytes for i in bucket.members]
        assert sum(sizes[:-1]) < max(cap_bytes, 1)  # the last one only may take it past the cap
        assert {specs[i].dtype for i in bucket.members} == {bucket.dtype}
        ends = [o + specs[i].elements for o, i in zip(bucket.offsets, bucket.members, strict=True)]
        assert list(bucket.offsets) == [0, *ends[:-1]]
        assert bucket.elements == ends[-1]


@pytest.mark.parametrize(("cap", "first"), [(0, 1), (1, 0), (-1, 1)])
def test_sizes_must_be_positive(cap: int, first: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        plan_buckets(fp32(1), cap, first)


def test_views_keep_strides_and_do_not_overlap() -> None:
    parameters = [
        torch.empty(3, 4),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(()),
    ]
    parameters.append(torch.empty(6)[::2])
    (plan,) = plan_buckets([GradientSpec(p.numel(), p.dtype, p.device) for p in parameters])
    bucket = Bucket(plan, parameters, with_tail=True)
    for number, (member, view) in enumerate(zip(plan.members, bucket.views, strict=True)):
        assert view.shape == parameters[member].shape
        view.fill_(number + 1)
    assert bucket.views[2].stride() == parameters[1].stride()
    assert bucket.tail is not None
    assert torch.equal(bucket.tail, torch.zeros(TAIL_ELEMENTS))
    assert float(bucket.flat.sum()) == sum((n + 1) * v.numel() for n, v in enumerate(bucket.views))


def test_renewed_memory_is_other_memory() -> None:
    parameter = torch.empty(3)
    (plan,) = plan_buckets(fp32(3))
    bucket = Bucket(plan, [parameter], with_tail=False)
    old = bucket.views[0]
    bucket.renew()
    old.fill_(7)
    assert torch.equal(bucket.views[0], torch.zeros(3))


def test_only_fp32_on_the_cpu_carries_the_pair() -> None:
    (plan,) = plan_buckets([GradientSpec(3, torch.float16, CPU)])
    with pytest.raises(ValueError, match="float16"):
        Bucket(plan, [torch.empty(3, dtype=torch.float16)], with_tail=True)
