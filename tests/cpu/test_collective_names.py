"""Names that gloo ranks compare before they exchange."""

from __future__ import annotations

from ulysses_ops.all_to_all import NAME_BYTES, shortened


def test_a_name_that_fits_is_left_alone() -> None:
    assert shortened("a" * NAME_BYTES) == b"a" * NAME_BYTES


def test_long_names_that_differ_only_at_the_end_stay_apart() -> None:
    start = "é" * NAME_BYTES
    one, other = shortened(start + "1"), shortened(start + "2")
    assert one != other
    assert len(one) == len(other) == NAME_BYTES
    assert one.decode(errors="replace") != other.decode(errors="replace")
