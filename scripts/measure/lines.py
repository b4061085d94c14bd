"""What programs print, as lines of benches/results."""

import json
import re


def json_of(output):
    """The last line of a program's output."""
    return json.loads(output.strip().splitlines()[-1])


def sizes(line):
    keys = {"shape": "shape", "positions": "tokens", "components": "mixtures", "context": "context", "vocab": "vocab"}
    return {key: line[name] for key, name in keys.items()}


def composed_step(line):
    other = {"implementation": "composed of candle operations", "seconds": line["seconds"]}
    return sizes(line) | other | {"extra_mib": line["peak_extra_mib"]}


def training_step(line):
    kept = sizes(line) | {"seconds": line["seconds"], "extra_mib": line["peak_extra_mib"]}
    if "gemm3_seconds" in line:
        kept |= {"mixture_seconds": line["mixture_seconds"], "products_seconds": line["gemm3_seconds"]}
        kept["mixture_over_products"] = line["mixture_over_products"]
    return kept


def loss_alone(line):
    kept = sizes(line) | {"seconds": line["seconds"], "extra_mib": line["peak_extra_mib"]}
    kept |= {"mixture_seconds": line["mixture_seconds"], "product_seconds": line["gemm1_seconds"]}
    return kept | {"mixture_over_product": line["mixture_over_products"]}


def decoding_lines(times):
    """From milliseconds by the names of criterion."""
    keys = {"top_k1": "top_1_ms", "top_k10": "top_10_ms", "top_k50": "top_50_ms"}
    widths = {"10000": 280, "33278": 300, "128256": 1024}
    lines = {}
    for name, milliseconds in times.items():
        device, way, *what, shape, _ = name.split("/")
        if device != "cpu":
            continue
        line = {"figure": "decoding", "shape": shape}
        bench = "/".join([way, *what, shape])
        if way == "read":
            vocab = shape[1:]
            line |= {"vocab": int(vocab), "context": widths[vocab], "implementation": "read of the decoder"}
            key = "read_ms"
        elif shape.startswith("ptb-b"):
            line |= {"figure": "decoding-heads", "positions": int(shape[5:]), "implementation": "mos-head", "head": way}
            key = "sample_ms"
        else:
            vocab, components, batch = re.fullmatch(r"v(\d+)-k(\d+)-b(\d+)", shape).groups()
            line |= {"vocab": int(vocab), "components": int(components), "context": widths[vocab]}
            implementation = "mos-head" if way == "mixture" else "composed of candle operations"
            line |= {"positions": int(batch), "implementation": implementation}
            key = keys.get(what[0], what[0] + "_ms")
            bench = f"{way}/.*/{shape}/"
        line["command"] = f"cargo bench --bench decoding -- '{bench}'"
        lines.setdefault((way, shape), line)[key] = milliseconds
    ways = ["softmax", "mos", "mos-ancestral", "mixture", "composed", "read"]
    order = [lines[key] for way in ways for key in lines if key[0] == way]
    return sorted(order, key=lambda line: [int(number) for number in re.findall(r"\d+", line["shape"])])


def assignment_lines(output):
    """From what the test `report` prints."""
    lines, names = [], {"equal counts": "of equal counts", "Zipf's counts": "by Zipf's law"}
    names["the same costs"] = "of the same costs"
    for text in output.splitlines():
        found = re.search(r"^(?:test .* \.\.\. )?(.*), (\d+) words in (\d+) x \d+ cells, (.*): ([\d.]+) s, cost", text)
        gap = re.search(r"([\d.]+)% above the least", text)
        if found and found[1] in names and found[2] in ("2500", "100000"):
            words, side, candidates = f"{int(found[2]):,}".replace(",", " "), found[3], re.search(r"\d+", found[4])
            words = found[2] if len(found[2]) == 4 else words
            lines.append(
                {
                    "figure": "assignment",
                    "shape": f"{words} words {names[found[1]]}, {side} x {side}",
                    "implementation": f"{candidates[0]} candidates" if candidates else "exact",
                    "seconds": float(found[5]),
                }
            )
            last = lines[-1]
        elif found:
            last = {}
        elif gap:
            last["gap_percent"] = float(gap[1])
    return lines


def rounded(key, value):
    """Four significant digits."""
    if not isinstance(value, float):
        return value
    value = round(value, 1) if key.endswith("_mib") else float(f"{value:.4g}")
    return int(value) if value == int(value) and value >= 1000 else value
