"""engram_gather."""

import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.engram_gather.reference import engram_gather
from deepinfer_plugins.kernels.formats import decode_mxfp8

from .conformance import Case, Conformance, Draw


class TestEngramGather(Conformance):
    op = "engram_gather"
    sizes = (0, 1, 63, 1000)

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        args = {"table": draw.e4m3(50, 64), "table_scales": draw.scales(50, 2)}
        args["index"] = draw.ints(-1, 50, num_rows, 6)
        return Case(args, rows=("index",))


def test_rows_lie_side_by_side(device: torch.device) -> None:
    args = TestEngramGather().case(Draw(device), 9, "").args
    values, scales = engram_gather(**args)
    got = decode_mxfp8(values, scales).view(9, 6, 64)
    table = decode_mxfp8(args["table"], args["table_scales"])
    for row, indices in enumerate(args["index"].tolist()):
        for place, index in enumerate(indices):
            want = table[index] if index >= 0 else torch.zeros_like(table[0])
            assert_same_bits(got[row, place], want, f"row {row}, place {place}, index {index}")


def test_no_row_is_zeros_with_unit_scales(device: torch.device) -> None:
    draw = Draw(device)
    # A table whose first row is NaN: what index -1 must not touch.
    table = torch.full((3, 32), 0xFF, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    values, scales = engram_gather(table, draw.scales(3, 1), torch.full((2, 2), -1, device=device))
    assert not values.view(torch.uint8).any()
    assert (scales == 127).all()
