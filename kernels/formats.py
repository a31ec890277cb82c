"""Number formats and cache records: the one place that turns numbers into bytes and back.

Encoding works in float32, as the model's definition does ("Casts" in ``deepinfer_plugins/model/README.md``).
Decoding gives float64, in which every decoded value, and every product of two, is exact. ``cache_layout.py``
says where the bytes of a record lie.
"""

from __future__ import annotations

import functools

import torch

from deepinfer_plugins.kernels.cache_layout import FP4_GROUP, INDEX_GROUP, MXFP8_GROUP

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E4M3_AMAX_FLOOR = 1e-4
E2M1_AMAX_FLOOR = 6 * 2.0**-126
FP4_AMAX_FLOOR = 6 * 2.0**-9
UNIT_SCALE = 127

# Up to this many, torch's own conversion of e4m3 beats a look-up, which is several calls. The values are the same.
_FEW = 1024

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two from their bytes.

    Args:
        scales: Any shape, uint8. Byte ``b`` is ``2**(b - 127)``; 255 is NaN.

    Returns:
        Same shape, float64.
    """
    return scales.view(torch.float8_e8m0fnu).double()


def decode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Float64 values of e4m3 numbers (``float8_e4m3fn``, or their bytes as uint8), any shape."""
    if values.numel() <= _FEW:
        return values.view(torch.float8_e4m3fn).double()
    return _look_up(_e4m3_values(values.device), values.view(torch.uint8))


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to e2m1, ties to even, saturating at 6, and pack two to a byte.

    Args:
        x: ``[..., d]``, float32, ``d`` even.

    Returns:
        ``[..., d / 2]``, uint8; the value of even index in the low nibble. A negative zero keeps its sign.
    """
    magnitude = torch.bucketize(x.abs(), _e2m1_ties(x.device), out_int32=True)
    codes = (magnitude | torch.signbit(x).int() << 3).view(*x.shape[:-1], x.shape[-1] // 2, 2)
    return (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Float64 values ``[..., d]`` of packed e2m1 bytes ``[..., d / 2]``."""
    pairs = _look_up(_e2m1_pairs(packed.device), packed)
    return torch.view_as_real(pairs).flatten(-2)


def encode_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 with one power-of-two scale per 32 values.

    Args:
        x: ``[..., d]``, bfloat16 or float32, ``d`` a multiple of 32.

    Returns:
        values: ``[..., d]``, ``float8_e4m3fn``.
        scales: ``[..., d / 32]``, uint8, UE8M0.
    """
    groups = _groups(x, MXFP8_GROUP)
    scales = _power_of_two_scale(groups, E4M3_MAX, E4M3_AMAX_FLOOR)
    # The scale rounds up, so no quotient reaches 464, where torch's cast would give NaN instead of 448.
    values = (groups * _reciprocal(scales)).to(torch.float8_e4m3fn)
    return values.view(x.shape), scales.to(torch.uint8)


def decode_mxfp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float64 ``[..., d]`` of e4m3 values (or bytes) ``[..., d]`` and UE8M0 bytes ``[..., d / 32]``."""
    return _scaled(decode_e4m3(values), decode_ue8m0(scales))


def decode_mxfp8_weight(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float64 values of a weight with one scale per 32x32 block.

    Args:
        weight: ``[m, k]``, e4m3, ``k`` a multiple of 32.
        scales: ``[ceil(m / 32), k / 32]``, uint8, UE8M0.

    Returns:
        ``[m, k]``, float64.
    """
    per_row = decode_ue8m0(scales)[:, None].expand(-1, MXFP8_GROUP, -1).flatten(0, 1)
    return _scaled(decode_e4m3(weight), per_row[: weight.shape[0]])


def encode_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e2m1 with one power-of-two scale per 32 values.

    Args:
        x: ``[..., d]``, bfloat16 or float32, ``d`` a multiple of 32.

    Returns:
        packed: ``[..., d / 2]``, uint8.
        scales: ``[..., d / 32]``, uint8, UE8M0.
    """
    groups = _groups(x, INDEX_GROUP)
    scales = _power_of_two_scale(groups, E2M1_MAX, E2M1_AMAX_FLOOR)
    values = (groups * _reciprocal(scales)).view(x.shape)
    return encode_e2m1(values), scales.to(torch.uint8)


def decode_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float64 ``[..., d]`` of packed e2m1 ``[..., d / 2]`` and UE8M0 bytes ``[..., d / 32]``."""
    return _scaled(decode_e2m1(packed), decode_ue8m0(scales))


def encode_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e2m1 with one e4m3 scale per 16 values.

    Args:
        x: ``[..., d]``, bfloat16 or float32, ``d`` a multiple of 16.

    Returns:
        packed: ``[..., d / 2]``, uint8.
        scales: ``[..., d / 16]``, ``float8_e4m3fn``.
    """
    groups = _groups(x, FP4_GROUP)
    sixth = torch.tensor(1 / 6, dtype=torch.float32).item()
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=FP4_AMAX_FLOOR)
    scales = (amax * sixth).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    values = (groups * scales.float().reciprocal()).view(x.shape)
    return encode_e2m1(values), scales.squeeze(-1)


def decode_fp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float64 ``[..., d]`` of packed e2m1 ``[..., d / 2]`` and e4m3 scales (or bytes) ``[..., d / 16]``."""
    return _scaled(decode_e2m1(packed), decode_e4m3(scales))


def encode_window(x: torch.Tensor) -> torch.Tensor:
    """Window records, uint8 ``[..., window_bytes(d)]``, of ``x [..., d]``."""
    values, scales = encode_mxfp8(x)
    return torch.cat([values.view(torch.uint8), scales], -1)


def decode_window(records: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Float64 keys ``[..., head_dim]`` of window records."""
    return decode_mxfp8(records[..., :head_dim], records[..., head_dim:])


def encode_compressed(x: torch.Tensor) -> torch.Tensor:
    """Compressed records, uint8 ``[..., compressed_bytes(d)]``, of ``x [..., d]``."""
    packed, scales = encode_fp4(x)
    return torch.cat([packed, scales.view(torch.uint8)], -1)


def decode_compressed(records: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Float64 keys ``[..., head_dim]`` of compressed records."""
    return decode_fp4(records[..., : head_dim // 2], records[..., head_dim // 2 :])


def encode_index_key(x: torch.Tensor) -> torch.Tensor:
    """Index-key records, uint8 ``[..., index_key_bytes(d)]``, of ``x [..., d]``."""
    return torch.cat(encode_mxfp4(x), -1)


def decode_index_key(records: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Float64 index keys ``[..., head_dim]`` of index-key records."""
    return decode_mxfp4(records[..., : head_dim // 2], records[..., head_dim // 2 :])


def _groups(x: torch.Tensor, group: int) -> torch.Tensor:
    if x.shape[-1] % group:
        raise ValueError(f"the last dimension is quantised in groups of {group}, but it is {x.shape[-1]}")
    return x.float().unflatten(-1, (x.shape[-1] // group, group))


def _power_of_two_scale(groups: torch.Tensor, qmax: float, floor: float) -> torch.Tensor:
    """UE8M0 bytes ``[..., num_groups]``, as int32: the ceiling of ``log2(amax / qmax)``; 255 if not finite."""
    amax = groups.abs().amax(-1).clamp_(min=floor)
    scale = amax.div_(qmax).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    # Adding all mantissa bits carries into the exponent unless the mantissa is zero.
    return scale.view(torch.int32).add_(0x7FFFFF).bitwise_right_shift_(23)


def _reciprocal(scales: torch.Tensor) -> torch.Tensor:
    """Exact ``2**(127 - byte)``, float32 ``[..., 1]``; NaN for 255."""
    return _look_up(_ue8m0_reciprocals(scales.device), scales).unsqueeze(-1)


def _scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``values [..., d]`` times ``scales [..., num_groups]``, in place."""
    group = values.shape[-1] // scales.shape[-1]
    values.view(*scales.shape, group).mul_(scales.unsqueeze(-1))
    return values


def _look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    # On a CPU several times as fast as torch's own conversion of many numbers.
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


@functools.cache
def _ue8m0_reciprocals(device: torch.device) -> torch.Tensor:
    # Byte 0 is never asked for: the floors of amax keep every scale above it.
    powers = [0.0, *(2.0 ** (127 - byte) for byte in range(1, 255))]
    return torch.tensor([*powers, float("nan")], dtype=torch.float32, device=device)


@functools.cache
def _e4m3_values(device: torch.device) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return codes.view(torch.float8_e4m3fn).double().to(device)


@functools.cache
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """Both values of each byte as one complex number: one look-up then decodes two."""
    values = [*_E2M1_MAGNITUDES, *(-value for value in _E2M1_MAGNITUDES)]
    pairs = [complex(values[byte & 15], values[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.complex128, device=device)


@functools.cache
def _e2m1_ties(device: torch.device) -> torch.Tensor:
    """Greatest float32 that still rounds down to each magnitude; a tie goes to the code that is even."""
    ties = [
        torch.tensor((low + high) / 2)
        for low, high in zip(_E2M1_MAGNITUDES, _E2M1_MAGNITUDES[1:], strict=False)
    ]
    odd_goes_up = [
        torch.nextafter(tie, tie.new_zeros(())) if code % 2 else tie for code, tie in enumerate(ties)
    ]
    return torch.stack(odd_goes_up).to(device)
