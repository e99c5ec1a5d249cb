"""Write the pages of docs/results from the JSON beside them: `python scripts/results_pages.py`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # a test loads this file from elsewhere
from results_common import GENERATED, RESULTS, read, where
from results_serving import serving

# What nobody ran on hardware: compiled only (`tuner compile`).
COMPILE_ONLY = ("sm_100", "gfx942", "gfx950", "bmg")


def kernels() -> str:
    """The page of the kernels."""
    parts = [f"# Kernels, measured\n\n{GENERATED}\n"]
    parts += [_moe(read(f"h200_moe_{mode}.json")) for mode in ("bf16", "fp8")]
    parts.append(_few(read("h200_few_rows.json")))
    parts.append(_streamed(read("h200_streamed.json")))
    parts.append(_single(read("h200_single_rows.json")))
    parts.append(_many(read("h200_large_rows.json")))
    parts.append(_ops(read("h200_ops.json")))
    parts.append(_expert_parallel(read("h200_expert_parallel.json")))
    parts.append(_compiled(read("bmg_compile.json")))
    parts.append(
        "## Compile-only\n\nNever run on hardware here, compiled only: " + ", ".join(COMPILE_ONLY) + ". "
        "ROCm and XPU device leaves are tested over a simulated device.\n"
    )
    return "\n".join(parts)


def tuner() -> str:
    """The page of the tuner."""
    d = read("h200_tuner.json")
    lines = [f"# The tuner, measured\n\n{GENERATED}\n", f"## On an H200 with {d['host']}\n", where(d) + "\n"]
    lines += [f"- {note}" for note in d["notes"]]
    problem = {name: value for name, value in d["problem"].items() if name != "op"}
    runs = [{**run, "shape": " ".join(f"{n}={v}" for n, v in run.get("problem", problem).items())} for run in d["runs"]]
    lines += [f"\nop={d['problem']['op']}\n", *_tunings(runs), *_regrets(runs), *_sweeps(d["sweeps"], d["replays"])]
    lines += ["\n## The old way\n", d["serial"]["words"], "\n## Planted faults\n", "| config | outcome |", "|---|---|"]
    lines += [f"| {fault['config']} | {fault['outcome']} |" for fault in d["planted"]]
    lines += [f"\nMeasured {d['planted_date']}.\n", "## Tuned times of the whole op\n"]
    return "\n".join([*lines, *_tuned(runs)]) + "\n"


def _tunings(runs: list[dict[str, Any]]) -> list[str]:
    heads = ("engine", "dtype", "shape", "effort", "date", "wall s", "of it start, search, finals, files",
             "configs tried", "compiles (late)", "mean regret %", "worst %", "gain over default")  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for r in runs:
        parts = ", ".join(str(seconds) for seconds in r["seconds"])
        judged = r.get("judged")
        regret = "- | -"
        if judged is not None:
            regret = f"{_within(judged['mean'])} | {_within(judged['worst'])} at M={judged['worst_at']}"
        lines.append(
            f"| {r['engine']} | {r['dtype']} | {r['shape']} | {r['effort']} | {r['date']} | {r['wall_s']} | {parts} | "
            f"{r['tried']} | {r['compiles']} ({r['late']}) | {regret} | {r['gain']} |"
        )
    return lines


def _within(found: list[float]) -> str:
    """A figure with its interval."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*found)


def _regrets(runs: list[dict[str, Any]]) -> list[str]:
    judged = [run for run in runs if "judged" in run]
    heads = [f"{run['dtype']} {run['effort']}" for run in judged]
    lines = [
        "\n## Regret of every batch size, in %\n",
        "| M | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
    ]
    for rows in zip(*(run["rows"] for run in judged), strict=True):
        lines.append(f"| {rows[0]['m']} | " + " | ".join(_within(row["regret"]) for row in rows) + " |")
    return lines


def _sweeps(sweeps: list[dict[str, Any]], replays: list[dict[str, Any]]) -> list[str]:
    lines = ["\n## Sweeps, and searches replayed on them\n"]
    lines += [f"- {sweep['dtype']}: {sweep['words']}" for sweep in sweeps]
    heads = ("sweep", "effort", "prior", "mean regret", "worst", "of the sweep's timings", "under noise: mean", "worst")
    lines += ["\n| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for r in replays:
        lines.append(
            f"| {r['sweep']} | {r['effort']} | {r['prior']} | {r['mean']} % | {r['worst']} % | {r['share']} % | "
            f"{r['noisy_mean']} % | {r['noisy_worst']} % |"
        )
    return lines


def _tuned(runs: list[dict[str, Any]]) -> list[str]:
    shown = [run for run in runs if run["rows"]]
    heads = [f"{run['engine']} {run['dtype']} {run['shape'].split()[0]} {run['effort']}: us (gain)" for run in shown]
    sizes = sorted({row["m"] for run in shown for row in run["rows"]})
    lines = ["| M | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for size in sizes:
        found = [next((row for row in run["rows"] if row["m"] == size), None) for run in shown]
        cells = ["-" if row is None else f"{row['us']} ({row['gain']})" for row in found]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return lines


def orchestrator() -> str:
    """The page of the control plane."""
    d = read("orchestrator_overhead.json")
    low, high = sorted(d["load"])
    return (
        f"# The orchestrator, measured\n\n{GENERATED}\n\n{d['device']}, Python {d['python']}, {d['date']}, "
        f"load average {low} to {high}: `{d['command']}`\n\n"
        f"{d['cells']} cells that do nothing, through process isolation on {d['slots']} slots; "
        f"{d['passed']} passed.\n\n"
        "| | |\n|---|---|\n"
        f"| a child alone, started the same way | {d['child_ms']} ms |\n"
        f"| a cell, in its slot | {d['cell_ms']} ms |\n"
        f"| so the orchestrator adds | {d['overhead_ms']} ms |\n"
        f"| its own processor time per cell | {d['cpu_ms']} ms |\n"
        f"| planning 10,000 cells | {d['plan_10000_s']} s |\n"
        f"| memory at most | {d['rss_mib']} MiB |\n"
    )


def faults() -> str:
    """The page of broken runs and fuzzed readers."""
    d = read("faults.json")
    lines = [f"# Faults, measured\n\n{GENERATED}\n\n{d['device']}, Python {d['python']}, {d['date']}\n"]
    lines += [f"## Random rounds over {d['matrix_cells']} cells, and hits at chosen points\n"]
    lines += ["| command | runs | seeds | orchestrators | points hit (kinds) | wrong | wall s (load) | memory MiB |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for run in (*d["rounds"], *d["sweeps"]):
        seeds, hit = "{} to {}".format(*run["seeds"]), f"{run['points_hit']} ({run['kinds_of_points_hit']})"
        lines.append(
            f"| `{run['command']}` | {run['rounds']} | {seeds} | {run['orchestrators']} | {hit} | {run['wrong']} | "
            f"{run['wall_s']} ({run['load']}) | {run['peak_rss_mib']} |"
        )
    for title, key in (("faults", "faults"), ("between two orchestrators", "between")):
        counts: dict[str, int] = {}
        for run in d["rounds"]:
            for name, times in run[key].items():
                counts[name] = counts.get(name, 0) + times
        if counts:
            told = ", ".join(f"{name} {times}" for name, times in sorted(counts.items(), key=lambda item: -item[1]))
            lines.append(f"\nOf the rounds, {title}: {told}.")
    lines += [f"\n## Fuzzing\n\n`{d['fuzz']['command']}`\n"]
    lines += ["| reader | examples | slowest s | seeds |", "|---|---|---|---|"]
    lines += [
        f"| {t['target']} | {t['examples']} | {t['slowest_s']} | {t['seeds'][0]} to {t['seeds'][1]} |"
        for t in d["fuzz"]["targets"]
    ]
    lines += ["\nFound and mended, each with a test:\n", *(f"- {text}" for text in d["fuzz"]["found"])]
    return "\n".join(lines) + "\n"


def gate() -> str:
    """The page of the gate."""
    d = read("h200_planted_slowdown.json")
    lines = [f"# The gate, measured\n\n{GENERATED}\n", "## A slowdown planted in a Triton kernel\n", where(d) + "\n"]
    lines += [f"- {note}" for note in d["notes"]]
    sizes = list(d["calibration"][0]["us"])
    lines += [f"\nWhat each dose costs, four rounds in turn, one process per dose (`{d['calibration_command']}`):\n"]
    lines += ["| steps too many | " + " | ".join(f"M {m}" for m in sizes) + " |", "|---|" + "---|" * len(sizes)]
    base = d["calibration"][0]["us"]
    lines += [
        f"| {row['dose']} | "
        + " | ".join(f"{row['us'][m]} us ({100 * (row['us'][m] / base[m] - 1):+.1f} %)" for m in sizes)
        + " |"
        for row in d["calibration"]
    ]
    lines += [
        f"\nThen `orchestrator run` with {d['dose']} steps too many, M {', '.join(map(str, d['sizes']))}, "
        f"{d['screen']} screening pairs, {d['confirm']} to confirm, margin {100 * d['margin']:.0f} %, q {d['q']}:\n",
        "| candidate | verdict | gain | interval | p | exit | pairs | wall s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, run in d["runs"].items():
        gain, low, high = run["gain"]
        pairs = sum(map(len, run["log_ratios"].values()))
        lines.append(
            f"| {name} | {run['verdict']} | {100 * gain:+.2f} % | {100 * low:+.2f} to {100 * high:+.2f} % | "
            f"{'' if run['p'] is None else format(run['p'], '.4f')} | {run['exit']} | {pairs} | {run['wall_s']} |"
        )
    ratios = "; ".join(
        f"{name} " + ", ".join(f"{100 * math.expm1(v):+.2f}" for stage in run["log_ratios"].values() for v in stage)
        for name, run in d["runs"].items()
    )
    return "\n".join([*lines, f"\nEvery pair, in percent: {ratios}.\n"])


PAGES = {
    "kernels.md": kernels,
    "tuner.md": tuner,
    "orchestrator.md": orchestrator,
    "serving.md": serving,
    "gate.md": gate,
    "faults.md": faults,
}


def _expert_parallel(d: dict[str, Any]) -> str:
    lines = ["## Expert parallelism: rows into and out of the send buffer\n", where(d) + "\n"]
    lines += ["- one rank, which sends to itself; two ranks on two GPUs are on the page of [serving](serving.md)\n"]
    lines += ["| tokens | MiB moved | permute us | of copy | unpermute us | of copy | route us |", "|---|" + "---|" * 6]
    lines += [
        f"| {r['tokens']} | {r['bytes'] / 2**20:.0f} | {r['permute_us']} | {r['permute_of_copy']:.2f} | "
        f"{r['unpermute_us']} | {r['unpermute_of_copy']:.2f} | {r['route_us']} |"
        for r in d["sizes"]
    ]
    errors = ", ".join(f"{mode} {error:.1e}" for mode, error in d["relative_error"].items())
    lines.append(f"\nRelative error of the layer against the float32 twin: {errors}.\n")
    return "\n".join(lines)


def _moe(d: dict[str, Any]) -> str:
    lines = [f"## Fused experts, {d['mode']}, beside SGLang's kernels\n", where(d) + "\n"]
    lines += [f"- {note}" for note in d["notes"]]
    lines.append(f"\nGeometric mean of the ratios: {d['geomean']:.3f}.\n")
    lines.append("| shape | M | ours us | SGLang us | ratio | up us | best up us | of floor | SGLang's best over it | "
                 "down us | of floor |")  # fmt: skip
    lines.append("|" + "---|" * 11)
    for shape in d["shapes"].values():
        e, topk, h, n = shape["dims"]
        for row in shape["rows"]:
            mine, floor, chain = row["ours"], row["floor_us"], row["chain_us"]
            up, best, down = mine["up_us"], mine["up_best_us"], mine["down_us"]
            theirs = row["sglang"].get("up_best_us")  # absent from what was measured before 2026-11-30
            lines.append(
                f"| E={e} topk {topk} H={h} N={n} | {row['m']} | {chain['ours']:.1f} | {chain['sglang']:.1f} | "
                f"{row['ratio']:.3f} | {up:.1f} | {best:.1f} | {floor['up'] / best:.2f} | "
                f"{f'{theirs / best:.2f}' if theirs else '-'} | {down:.1f} | {floor['down'] / down:.2f} |"
            )
    lines += _gemm(d)
    lines += _rested(d)
    errors = "; ".join(
        f"{name}: " + ", ".join(f"{who} {err:.1e}" for who, err in shape["errors"].items())
        for name, shape in d["shapes"].items()
    )
    lines.append(f"\nWorst relative error against the float32 twin ({errors}).\n")
    return "\n".join(lines)


def _gemm(d: dict[str, Any]) -> list[str]:
    """The up projections that were also timed without the launch that quantises their input."""
    return _ups(
        d, "up_gemm_us", "The up projections without the launch that quantises their input",
        "best up us | GEMM us | of floor",
        lambda row, us: f"{row['ours']['up_best_us']:.1f} | {us:.1f} | {row['floor_us']['up'] / us:.2f}",
    )  # fmt: skip


def _rested(d: dict[str, Any]) -> list[str]:
    """The up projections that were also timed with a pause before each replay."""
    return _ups(
        d, "up_rested_us", "The up projections after a rest", "best up us | of floor | SGLang's best us | over ours",
        lambda row, us: f"{us:.1f} | {row['floor_us']['up'] / us:.2f} | {row['sglang']['up_rested_us']:.1f} | "
                        f"{row['sglang']['up_rested_us'] / us:.3f}",
    )  # fmt: skip


def _ups(d: dict[str, Any], field: str, title: str, columns: str, cells: Callable[[Any, float], str]) -> list[str]:
    """A table of the up projections that were timed in a further way, as `field` of ours; nothing where none was."""
    rows = [(shape["dims"], row) for shape in d["shapes"].values() for row in shape["rows"] if row["ours"].get(field)]
    lines = [
        f"| E={e} topk {topk} H={h} N={n} | {row['m']} | {cells(row, row['ours'][field])} |"
        for (e, topk, h, n), row in rows
    ]
    head = [f"\n{title}:\n", f"| shape | M | {columns} |", "|" + "---|" * (columns.count("|") + 3)]
    return [*head, *lines] if lines else []


def _few(d: dict[str, Any]) -> str:
    """Where the time of few rows goes, what was won of it, and what won nothing."""
    e, topk, h, n = d["shape"]
    lines = [f"## Fused experts, few rows\n\n{where(d)}\n", *(f"- {note}" for note in d["notes"])]
    lines += [f"\nE={e} topk {topk} H={h} N={n}:\n"]
    lines += ["| mode | M | chain us: SGLang, before, kept | up us: before, kept | down us: before, kept |"]
    lines += ["|" + "---|" * 5]
    for row in d["chains"]:
        chain = ", ".join(f"{row[who]:.1f}" for who in ("sglang", "before", "kept"))
        up, down = (", ".join(f"{us:.1f}" for us in row[part]) for part in ("up_us", "down_us"))
        lines.append(f"| {row['mode']} | {row['m']} | {chain} | {up} | {down} |")
    lines += [
        "\n| mode | M | kernel | programs | first starts | first has waited | first ends | last starts | last ends |"
    ]
    lines += ["|" + "---|" * 9]
    stages = ("first_start", "first_waited", "first_end", "last_start", "last_end")
    for row in d["stamps"]:
        for k in row["kernels"]:
            times = " | ".join(f"{k[stage]:.1f}" for stage in stages)
            lines.append(f"| {row['mode']} | {row['m']} | {k['kernel']} | {k['programs']} | {times} |")
    lines += ["\n| mode | M | up projection us | TB/s in each eighth of them |", "|---|---|---|---|"]
    for row in d["rates"]:
        rates = ", ".join(f"{rate:.1f}" for rate in row["tb_per_s"])
        lines.append(f"| {row['mode']} | {row['m']} | {row['us']} | {rates} |")
    lines += ["\n| tried | bf16 | fp8 |", "|---|---|---|"]
    for t in d["tried"]:
        lines.append(
            f"| {t['variant']} | " + " | ".join(f"{t[m]:.3f}" if t[m] else "-" for m in ("bf16", "fp8")) + " |"
        )
    return "\n".join(lines) + "\n"


def _single(d: dict[str, Any]) -> str:
    """Blocks of one row beside tiles, and how much of the down projection is asked for before it waits."""
    lines = [f"## Fused experts, single rows\n\n{where(d)}\n", *(f"- {note}" for note in d["notes"])]
    lines += ["\n| mode | shape | M | SGLang | tiles | single rows | SGLang over them | all, some, none | summing |",
              "|" + "---|" * 9]  # fmt: skip
    for row in d["rows"]:
        us, (e, topk, h, n) = row["us"], d["shapes"][row["shape"]]
        ahead = ", ".join(f"{us[part]:.1f}" for part in ("all", "some", "none"))
        lines.append(
            f"| {row['mode']} | E={e} topk {topk} H={h} N={n} | {row['m']} | {us['sglang']:.1f} | {us['tiles']:.1f} | "
            f"{us['single']:.1f} | {us['sglang'] / us['single']:.3f} | {ahead} | {us['sum']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _streamed(d: dict[str, Any]) -> str:
    """What was tried with the kernel that streams weights, over what it was before."""
    lines = [f"## Fused experts, streamed weights\n\n{where(d)}\n", *(f"- {note}" for note in d["notes"])]
    lines += ["\n| variant | mode | up | GEMM | chain |", "|---|---|---|---|---|"]
    for t in d["tried"]:
        times = " | ".join(f"{t[part]:.3f}" if part in t else "-" for part in ("up", "gemm", "chain"))
        lines.append(f"| {t['variant']} | {t['mode']} | {times} |")
    return "\n".join(lines) + "\n"


def _many(d: dict[str, Any]) -> str:
    lines = [f"## Fused experts, many rows\n\n{where(d)}\n", *(f"- {note}" for note in d["notes"])]
    lines += ["\n| mode | shape | M | up us: SGLang, before, many | of floor | chain us: SGLang, before, many | "
              "SGLang over before | over many |", "|" + "---|" * 8]  # fmt: skip
    for row in d["rows"]:
        us, (e, topk, h, n) = row["us"], d["shapes"][row["shape"]]
        up, chain = (
            ", ".join(f"{us[who][part]:.1f}" for who in ("sglang", "before", "many")) for part in ("up", "chain")
        )
        ratios = [us["sglang"]["chain"] / us[who]["chain"] for who in ("before", "many")]
        lines.append(
            f"| {row['mode']} | E={e} topk {topk} H={h} N={n} | {row['m']} | {up} | "
            f"{row['floor_us']['up'] / us['many']['up']:.2f} | {chain} | {ratios[0]:.3f} | {ratios[1]:.3f} |"
        )
    worst = "; ".join(f"{m}: many {e['many']:.1e}, before {e['before']:.1e}" for m, e in d["errors"].items())
    lines += [f"\nWorst relative error against the float32 twin ({worst}).", "\nWhat was tried beside it:\n"]
    lines += ["| variant | mode | its chain over that of the one kept, geometric mean |", "|---|---|---|"]
    lines += [f"| {t['variant']} | {t['mode']} | {t['chain']:.3f} |" for t in d["tried"]]
    lines += ["\n| sigmoid, up projection at M | mode | fast us | exact us |", "|---|---|---|---|"]
    lines += [f"| {s['m']} | {s['mode']} | {s['fast_us']:.1f} | {s['exact_us']:.1f} |" for s in d["sigmoid"]]
    return "\n".join(lines) + "\n"


def _compiled(d: dict[str, Any]) -> str:
    lines = ["## Compiled for bmg, never run\n", where(d) + "\n", *(f"- {note}" for note in d["notes"]), ""]
    lines += ["| variant | kernel | shared bytes | fits | block loads |", "|---|---|---|---|---|"]
    words = {True: "yes", False: "asked for, lost", None: ""}
    lines += [
        f"| {r['variant']} | {r['kernel']} | {r['shared']} | {'yes' if r['fits'] else 'no'} | "
        f"{words[r['block_loads']]} |"
        if r["status"] == "ok"
        else f"| {r['variant']} | | | {r['error']} | |"
        for r in d["facts"]
    ]
    return "\n".join(lines) + "\n"


def _ops(d: dict[str, Any]) -> str:
    lines = ["## Other operators\n", where(d) + "\n", *(f"- {note}" for note in d["notes"]), ""]
    lines += ["| operator | case | us | GB/s | of copy |", "|---|---|---|---|---|"]
    lines += [f"| {r['op']} | {r['case']} | {r['us']:.1f} | {r['GBps']:.0f} | {r['of_copy']:.2f} |" for r in d["rates"]]
    lines += ["\n### Alignment beside torch's operations\n", "| experts | topk | M | ours us | torch us |"]
    lines += ["|---|---|---|---|---|"]
    lines += [f"| {r['experts']} | {r['topk']} | {r['m']} | {r['us']:.1f} | {r['torch_us']:.1f} |" for r in d["align"]]
    lines += ["\n### Block-FP8 linear: torch's scaled_mm and our Triton kernel\n"]
    lines += [
        "| N | K | M | scaled_mm us | Triton us | scaled_mm error | Triton error |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['n']} | {r['k']} | {r['m']} | {r['scaled_mm_us']:.1f} | {r['triton_us']:.1f} | "
        f"{r['scaled_mm_error']:.1e} | {r['triton_error']:.1e} |"
        for r in d["linear"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name, page in PAGES.items():
        (RESULTS / name).write_text(page(), encoding="utf-8")
