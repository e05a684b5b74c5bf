"""Which product a layer takes: from what was measured, and through the file that records it."""

import pytest

from plugins.errors import KilnError
from plugins.quant_matmul.cuda_choice import Choice, Choices, Measured, recorded


def choices(*times: dict[str, float]) -> Choices:
    """Layer "one" at batches 1, 10, 100 and so on."""
    rows = (Measured("one", 64, 32, False, 10**i, row) for i, row in enumerate(times))
    return Choices("a device", tuple(rows))


def test_a_format_must_win_at_every_batch() -> None:
    wins = {"cublas": 10.0, "dense": 9.0, "int8": 6.0, "int8 w8a8": 8.0, "int4": 5.0}
    loses = {"cublas": 10.0, "int8": 12.0, "int8 w8a8": 8.0, "int4": 20.0}
    assert choices(wins, loses).of_layer("one") == Choice("int8", 1)
    assert choices(wins).of_layer("one") == Choice("int4", 1)
    assert choices(wins).of_layer("one", ("int8",)) == Choice("int8", 1)
    assert choices(wins, loses).of_layer("one", ("int4",)) == Choice(None, 1)


def test_sixteen_bits_stay_where_nothing_wins() -> None:
    none = {"cublas": 5.0, "dense": 6.0, "int8": 6.0, "int8 w8a8": 8.0}
    assert choices(none).of_layer("one", ("int8",)) == Choice(None, 0)


def test_what_is_written_is_read() -> None:
    one = choices({"cublas": 10.04, "int8": 6.0}, {"cublas": 11.0, "int8 w8a8": 7.5})
    again = Choices.from_json(one.to_json())
    assert again.device == "a device"
    assert again.measured[0].microseconds == {"cublas": 10.0, "int8": 6.0}
    assert again.measured[1] == one.measured[1]
    assert '"choice": "int8 w8a8"' in one.to_json()


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1, "device": "x", "measured": [{"layer": "one"}]}', "[]"])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(KilnError, match="expected what scripts/bench_cuda_quant"):
        Choices.from_json(text)


def test_unknown_layers_and_formats_are_refused() -> None:
    with pytest.raises(KilnError, match="layer two was not measured on a device; expected one of one"):
        choices({"cublas": 1.0}).of_layer("two")
    with pytest.raises(KilnError, match="expected some of int8"):
        choices({"cublas": 1.0}).measured[0].best(("int8",))


def test_int8_is_not_slower_than_sixteen_bits_on_an_h200() -> None:
    """Issue 6: at no batch from 1 to 128, for no layer of a Llama-8B shape."""
    table = recorded("h200")
    assert table is not None
    assert {one.batch for one in table.measured} >= {1, 8, 32, 64, 128}
    assert all(one.gain(("int8",)) <= 1 for one in table.measured)
    assert table.of_layer("gate_up", ("int8",)) == Choice("int8", 32)
    assert recorded("no-such-sku") is None
