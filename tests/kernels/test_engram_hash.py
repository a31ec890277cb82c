"""engram_hash."""

import torch

from deepinfer_plugins.kernels.engram_hash.reference import engram_hash

from .conformance import Case, Conformance, Draw

PRIMES = torch.tensor([[1009, 1013], [1019, 1021], [1031, 1033]])


def offsets() -> torch.Tensor:
    ends = PRIMES.flatten().cumsum(0)
    return (ends - PRIMES.flatten()).view_as(PRIMES)


class TestEngramHash(Conformance):
    op = "engram_hash"
    sizes = (0, 1, 63, 1000)

    def case(self, draw: Draw, num_rows: int, variant: str) -> Case:
        args = {
            "context": draw.ints(0, 99092, num_rows, 4),
            # Up to the bound that keeps products within 64 bits.
            "multipliers": draw.ints(0, (2**63 - 1) // 99092 // 2, 4) * 2 + 1,
            "primes": PRIMES.to(draw.device),
            "offsets": offsets().to(draw.device),
        }
        return Case(args, rows=("context",))


def test_agrees_with_pythons_integers(device: torch.device) -> None:
    args = TestEngramHash().case(Draw(device), 50, "").args
    multipliers, starts = args["multipliers"].tolist(), offsets().tolist()
    rows = engram_hash(**args).tolist()
    for context, got in zip(args["context"].tolist(), rows):
        want = []
        for n in (2, 3, 4):
            mixed = 0
            for token, multiplier in zip(context[:n], multipliers):
                assert token * multiplier < 2**63
                mixed ^= token * multiplier
            want += [mixed % p + start for p, start in zip(PRIMES[n - 2].tolist(), starts[n - 2])]
        assert got == want


def test_heads_never_share_a_row(device: torch.device) -> None:
    rows = engram_hash(**TestEngramHash().case(Draw(device), 1000, "").args)
    seen = [set(column.tolist()) for column in rows.unbind(1)]
    assert sum(map(len, seen)) == len(set.union(*seen))
    assert 0 <= min(map(min, seen)) and max(map(max, seen)) < int(PRIMES.sum())
