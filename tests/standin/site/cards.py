"""The simulated cards that this process can see: those of the mask, or those whose device file is in its container."""

import json
import os
from pathlib import Path

NAME = "Intel(R) Arc(TM) Pro B60 Graphics"
MEMORY = 25669140480


def every():
    return json.loads(Path(__file__).with_name("cards.json").read_text())


def visible():
    mask = os.environ.get("ZE_AFFINITY_MASK")
    if mask:
        return [every()[int(number)] for number in mask.split(",")]
    return [card for card in every() if Path(card["node"]).exists()]


def uuid(address):
    """A Level Zero UUID as the driver makes it: vendor, device, revision, domain, bus, device, function."""
    domain, bus, rest = address.split(":")
    device, function = rest.split(".")
    data = bytes.fromhex("868011e20000") + int(domain, 16).to_bytes(2, "little")
    data += bytes([int(bus, 16), int(device, 16), int(function, 16)]) + bytes(5)
    text = data.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
