"""The page of serving, from the JSON in docs/results."""

from __future__ import annotations

from statistics import median
from typing import Any

from results_common import GENERATED, RESULTS, read, where

__all__ = ["serving"]

COPY_GBS = (
    4300  # what a copy moves on an H200; the kernels' benches have their floors from it (tests/gpu/moe_problem.py)
)


def serving() -> str:
    """The page of serving."""
    parts = {
        "h200_serving_steps": _steps, "h200_decode_arms": _arms, "h200_serving_2x2": _square,
        "h200_serving_both": _both, "h200_expert_ranks": _ranks, "vllm_client": _client, "serving_soak": _soak,
    }  # fmt: skip
    found = [write(read(f"{name}.json")) for name, write in parts.items() if (RESULTS / f"{name}.json").is_file()]
    return "\n".join([f"# Serving, measured\n\n{GENERATED}\n", *found])


def _steps(d: dict[str, Any]) -> str:
    lines = [f"## A decode step of our engine against the reading of its weights\n\n{where(d)}\n"]
    lines += [f"- {note}" for note in d["notes"]]
    lines += ["\n| graph | configs | sequences | step ms | decode ms | floor ms | decode: share of floor | "
              f"at {COPY_GBS} GB/s |"]  # fmt: skip
    lines += ["|---|---|---|---|---|---|---|---|"]
    lines += [
        f"| {run['graph']} | {run['configs']} | {b['batch']} | {b['step_ms']:.3f} | {b['decode_ms']:.3f} | "
        f"{b['floor_ms']:.3f} | {b['decode_floor_share']:.2f} | {b['decode_floor_share'] * d['gbs'] / COPY_GBS:.2f} |"
        for run in d["runs"]
        for b in run["batches"]
    ]
    return "\n".join(lines) + "\n"


def _arms(d: dict[str, Any]) -> str:
    lines = [f"## A decode with untuned and with tuned configs\n\n{where(d)}\n", *(f"- {note}" for note in d["notes"])]
    lines += ["\n| sequences | timed | untuned us | tuned us | less us |", "|---|---|---|---|---|"]
    for sequences, both in d["sequences"].items():
        for what in both["tuned"]:
            rounds = [
                [row[-1] if isinstance(row, list) else row for row in both[arm][what]] for arm in ("untuned", "tuned")
            ]
            less = [a - b for a, b in zip(*rounds, strict=True)]
            old, new = (f"{median(values):.0f}" for values in rounds)
            spread = f"{median(less):.0f} ({min(less):.0f} to {max(less):.0f})"
            lines.append(f"| {sequences} | {what} | {old} | {new} | {spread} |")
    return "\n".join(lines) + "\n"


def _http(us: float | None) -> str:
    return f"{us:.1f}" if us is not None and us > 0 else "-"


def _square(d: dict[str, Any]) -> str:
    load = d["load"]
    lines = [f"## Untuned and tuned configs, `auto` and `triton`\n\n{where(d)}\n"]
    lines += [f"- {note}" for note in d["notes"]]
    lines += [f"- prompts of {load['input']} tokens, answers of {load['output']}, graph {load['graph']}, "
              f"{d['replicates']} replicates of four fresh servers"]  # fmt: skip
    lines += [
        "\n| backend | clients | TPOT untuned ms | tuned ms | gain | interval (level) | foretold | by the decode | "
        "HTTP us/token |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for c in d["cells"]:
        m = c["median_tpot_ms"]
        told = [c.get(name) for name in ("predicted_tpot_gain", "predicted_by_decode")]
        foretold = " | ".join("" if one is None else f"{100 * one['gain']:+.1f} %" for one in told)
        bounds = f"{100 * m['low']:+.1f} to {100 * m['high']:+.1f} % ({100 * m['level']:.0f} %)"
        lines.append(
            f"| {c['backend']} | {c['concurrency']} | {m['untuned']:.3f} | {m['tuned']:.3f} | {100 * m['gain']:+.1f} % "
            f"| {bounds} | {foretold} | {_http(c['http_per_token_us'])} |"
        )
    if any(_http(c["http_per_token_us"]) == "-" for c in d["cells"]):
        lines += ["\nHTTP us/token is the last token's way to the client less the first's, over the tokens after it; "
                  "`-`: the first token's was as long, so that it tells nothing.\n"]  # fmt: skip
    lines += ["\nInteraction (gain under `triton` less gain under `auto`, in log ratio): "
              + "; ".join(f"{i['concurrency']} client{'s' * (i['concurrency'] > 1)} {i['difference']:+.4f} "
                          f"[{i['low']:+.4f}, {i['high']:+.4f}] at "
                          f"{100 * i['level']:.0f} %" for i in d["interactions"]) + ".\n"]  # fmt: skip
    return "\n".join(lines)


def _both(d: dict[str, Any]) -> str:
    lines = [f"## Two servers side by side, their loads in turn\n\n{where(d)}\n"]
    lines += [f"- {note}" for note in d["notes"]]
    lines += ["\n| stage | pair | arm | TPOT ms | of its rounds | void |", "|---|---|---|---|---|---|"]
    for launch in d["launches"]:
        rounds = ", ".join(f"{value:.3f}" for value in launch["rounds_ms"])
        told = (
            launch["stage"],
            launch["pair"],
            launch["arm"],
            f"{launch['tpot_ms']:.3f}",
            rounds,
            launch["void"] or "",
        )
        lines.append("| " + " | ".join(map(str, told)) + " |")
    return "\n".join(lines) + "\n"


def _ranks(d: dict[str, Any]) -> str:
    lines = [f"## Experts spread over {d['ranks']} GPUs\n\n{where(d)}\n", *(f"- {note}" for note in d["notes"])]
    lines += [f"\nOne layer, wall time with its exchange of counts through the host, the slower rank; {d['layer']}:\n"]
    heads = ("tokens of a rank", "one GPU with all of them us", "fast us", "fast in two parts us", "deterministic us",
             "bare exchange us", "GB/s")  # fmt: skip
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    names = ("one_gpu_us", "fast_1_us", "fast_2_us", "deterministic_1_us", "exchange_us", "exchange_gb_s")
    for row in d["times"]:
        lines.append("| " + " | ".join(str(row[name]) for name in ("tokens_per_rank", *names)) + " |")
    lines += ["\n| layer against one GPU | largest relative error | as one GPU's | same bits as one GPU's |"]
    lines += ["|---|---|---|---|"]
    lines += [f"| {c['mode']} | {c['error']:.1e} | {c['alone']} | {c['same_bits']} |" for c in d["checks"]]
    lines += [
        "\n| server, against one process | answers the same | largest drift of a log-probability before | step ms |"
    ]
    lines += ["|---|---|---|---|"]
    for name, told in d["server"].items():
        lines.append(f"| {name} | {told['same']} | {told['drift']} | {told['step_ms']} |")
    return "\n".join(lines) + "\n"


def _client(d: dict[str, Any]) -> str:
    low, high = sorted(d["load_average"])[0], sorted(d["load_average"])[-1]
    lines = [
        f"## Our load client beside `vllm bench serve`\n\n{d['device']}, load average {low} to {high}, {d['date']}: "
        f"`{d['command']}`\n"
    ]
    lines += [f"- {note}" for note in d["notes"]]
    lines += [f"\nMean TPOT of answers of {d['output']} tokens, each client's over what the server measured of the "
              "very same requests:\n",
              "| clients | requests | pairs | ours / server | `vllm bench serve` / server | ours / theirs | interval "
              "(level) |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for one in d["loads"]:
        lines.append(
            f"| {one['concurrency']} | {one['requests']} | {len(one['pairs'])} | {one['ours_over_server']:.4f} | "
            f"{one['theirs_over_server']:.4f} | {100 * one['difference']:+.2f} % | {100 * one['low']:+.2f} to "
            f"{100 * one['high']:+.2f} % ({100 * one['level']:.0f} %) |"
        )
    lines += ["\n| clients | ours ms | server ms | ratio | `vllm bench serve` ms | server ms | ratio |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for one in d["loads"]:
        for pair in one["pairs"]:
            mine, mine_server, other, other_server = (
                pair[name] for name in ("ours_ms", "ours_server_ms", "theirs_ms", "theirs_server_ms")
            )
            lines.append(f"| {one['concurrency']} | {mine:.3f} | {mine_server:.3f} | {mine / mine_server:.4f} | "
                         f"{other:.3f} | {other_server:.3f} | {other / other_server:.4f} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def _soak(d: dict[str, Any]) -> str:
    requests = ", ".join(f"{count} {kind}" for kind, count in sorted(d["requests"].items()))
    return (
        f"## Soak\n\n{d['device']}, load average {d['load_average']}, {d['date']}: `{d['command']}`\n\n"
        f"{d['seconds']} s: {requests}; {len(d['faults'])} faults. Memory of server and worker: "
        f"{d['memory_first'][0] / 2**20:.0f} MiB first, {d['memory_last'][0] / 2**20:.0f} MiB last, last quarter over "
        f"the second {100 * d['memory_growth']:+.2f} %.\n"
    )
