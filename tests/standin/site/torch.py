"""torch on a simulated B60 host, as far as the probe of a foreign engine asks it."""

from types import SimpleNamespace

import cards

__version__ = "2.13.0+xpu"
version = SimpleNamespace(hip=None, cuda=None)
cuda = SimpleNamespace(is_available=lambda: False)


def _properties(index):
    card = cards.visible()[index]
    return SimpleNamespace(name=cards.NAME, total_memory=cards.MEMORY, uuid=cards.uuid(card["address"]))


xpu = SimpleNamespace(is_available=lambda: bool(cards.visible()), get_device_properties=_properties)
