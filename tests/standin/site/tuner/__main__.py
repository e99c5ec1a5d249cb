"""`tuner tune` on a simulated card: the shipped files of this shape, with a result as the real tuner writes it."""

import os
import shutil
import sys
from pathlib import Path

import cards

from moegate.canonical import file_digest
from moegate.paths import config_root
from moegate.records import DeviceIdentity, Measurement, write


def main(argv):
    options = dict(word.removeprefix("--").split("=", 1) for word in argv[1:])
    assert (argv[0], options["engine"], options["effort"]) == ("tune", "sglang", "full"), argv
    (card,) = cards.visible()
    folder = Path(options["out"]) / "configs" / "triton_3_8_0"
    folder.mkdir(parents=True)
    for file in (config_root() / "triton_3_8_0").glob("E=64,N=896,*B60*"):
        shutil.copy(file, folder)
    result = Path(options["result"])
    outputs = {os.path.relpath(path, result.parent): file_digest(path) for path in folder.glob("*.json")}
    device = DeviceIdentity("xpu", cards.NAME, card["address"], "bmg", "1.6.33578", cards.MEMORY)
    write(result, Measurement("tune", "ok", device, {"triton": "3.8.0"}, {"evaluations": 60}, outputs=outputs))


main(sys.argv[1:])
