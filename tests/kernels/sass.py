"""What NVIDIA's disassembler says of a kernel for SM90, read for one mistake that no compiler tells.

A product of the matrix unit (HGMMA) reads its left operand from registers while the program goes on. The assembler
keeps these registers from others until the product has been waited for, as long as the program that it gets does so:
one whose loop writes the operand of the next product into the registers of this one is undefined, and right or wrong
by the chance of who is faster.
"""

from __future__ import annotations

import re

# Registers, by number, that products which ended a group read; and whether so.
Groups = tuple[frozenset[int], ...]

# Their first operand is read, or is no register.
_WRITES_NONE = {
    *("ATOMS", "BAR", "BRA", "CCTL", "DEPBAR", "ELECT", "ERRBAR", "EXIT", "FENCE", "FSETP", "HGMMA", "ISETP"),
    *(
        "MEMBAR",
        "NOP",
        "PLOP3",
        "R2UR",
        "RED",
        "RET",
        "ST",
        "STG",
        "STS",
        "STSM",
        "SYNCS",
        "UTMALDG",
        "WARPGROUP",
    ),
}


def overwritten_operands(sass: str) -> list[str]:
    """Instructions that write a register which a product that was not waited for may still be reading.

    Follows every path through the kernel, loops included, with the groups of products that are under way.
    """
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    found: list[str] = []
    seen: set[tuple[int, Groups, frozenset[int]]] = set()
    paths: list[tuple[int, Groups, frozenset[int]]] = [(0, (), frozenset())]
    while paths:
        place, groups, begun = paths.pop()
        while place < len(code) and (place, groups, begun) not in seen:
            seen.add((place, groups, begun))
            instruction = code[place]
            if _written(instruction) & begun.union(*groups):
                found.append(instruction)
            if product := re.search(r"HGMMA\S*\s+R\d+, R(\d+)", instruction):
                begun |= set(range(int(product[1]), int(product[1]) + 4))
            if "HGMMA" in instruction and "gsb0" in instruction:
                groups, begun = (*groups, begun), frozenset()
            if wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", instruction):
                groups = groups[max(0, len(groups) - int(wait[1])) :]
            if jump := re.search(r"BRA\s+`\((\.L_x_\d+)\)", instruction):
                paths.append((labels[jump[1]], groups, begun))
            if re.match(r"(BRA|EXIT|RET)\b", instruction):
                break
            place += 1
    return found


def _written(instruction: str) -> frozenset[int]:
    operation, _, operands = re.sub(r"^@!?U?P\w+\s+", "", instruction).partition(" ")
    name = operation.split(".")[0]
    target = re.match(r"(?:U?P\w+,\s*)?R(\d+)\b", operands)
    if name in _WRITES_NONE or not target:
        return frozenset()
    count = 1
    if ".128" in operation or (name == "LDSM" and operation.endswith("4")):
        count = 4
    elif any(mark in operation for mark in (".64", ".WIDE")) or (name == "CS2R" and ".32" not in operation):
        count = 2
    return frozenset(range(int(target[1]), int(target[1]) + count))
