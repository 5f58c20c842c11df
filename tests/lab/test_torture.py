"""What counts as the same end of two runs. (Real kills: tests/run/test_train.py, and the script itself.)"""
from torture import differing_bits


def test_differing_bits():
    assert differing_bits({"a": b"\x01\xff", "b": b"1"}, {"a": b"\x00\xff", "b": b"1"}) == (1, 24)
    assert differing_bits({"a": b"11"}, {"b": b"1"}) == (24, 24)
    assert differing_bits({"a": b"11"}, {"a": b"111"}) == (24, 24)
