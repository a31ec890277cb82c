"""Assertions that name the first place where two tensors differ."""

import torch


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, label: str) -> None:
    """Fail unless shape, dtype and every bit agree (NaN payloads included)."""
    assert got.shape == want.shape, f"{label}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{label}: dtype {got.dtype}, want {want.dtype}"
    if got.numel() == 0:
        return
    got, want = got.contiguous().cpu(), want.contiguous().cpu()
    differ = (got.reshape(-1, 1).view(torch.uint8) != want.reshape(-1, 1).view(torch.uint8)).any(-1)
    differ = differ.reshape(got.shape)
    if not differ.any():
        return
    first = int(differ.flatten().nonzero()[0])
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), got.shape))
    rows = int(differ.flatten(1).any(-1).sum()) if differ.dim() > 1 else int(differ.sum())
    raise AssertionError(
        f"{label}: first difference at {where}: got {got.flatten()[first].item()!r}, "
        f"want {want.flatten()[first].item()!r}; {rows} of {got.shape[0] if got.dim() else 1} rows differ"
    )
