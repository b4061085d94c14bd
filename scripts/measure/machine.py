"""The machine and the repository."""

import os
import subprocess


def git(*arguments):
    return subprocess.run(["git", *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def program(name):
    """A program of the lab."""
    return os.path.join(os.environ.get("CARGO_TARGET_DIR", "target"), "release", name)


def gpu():
    """The name of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[0]


def physical_cores():
    """The cores that this process may use, each counted once whatever its number of threads."""
    allowed, cores, core = os.sched_getaffinity(0), set(), {}
    with open("/proc/cpuinfo") as lines:
        for line in list(lines) + ["\n"]:
            key, _, value = line.partition(":")
            core[key.strip()] = value.strip()
            if not line.strip():
                number = int(core.get("processor", -1))
                if number in allowed:
                    cores.add((core.get("physical id"), core.get("core id", number)))
                core = {}
    return len(cores) or len(allowed)


def processor(cores):
    """As "2 cores of an AMD EPYC (Zen 4) with AVX-512"."""
    fields = {}
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", "processor")
    flags = fields.get("flags", "").split()
    number = (int(fields.get("cpu family", 0)), int(fields.get("model", 0)))
    kind, generation = name, None
    if fields.get("vendor_id") == "GenuineIntel":
        kind = "Intel Xeon" if "Xeon" in name else "Intel Core" if "Core" in name else "Intel processor"
        known = {85: "Skylake or Cascade Lake", 106: "Ice Lake", 108: "Ice Lake", 143: "Sapphire Rapids"}
        known |= {207: "Emerald Rapids", 173: "Granite Rapids", 174: "Granite Rapids"}
        later = "Sapphire Rapids or later" if "amx_tile" in flags else None
        generation = known.get(number[1], later)
    elif fields.get("vendor_id") == "AuthenticAMD":
        kind = next((f"AMD {line}" for line in ("EPYC", "Ryzen") if line in name), "AMD processor")
        family, model = number
        zen4 = family == 25 and (16 <= model < 32 or 96 <= model < 128 or 160 <= model < 176)
        generation = "Zen 4" if zen4 else {23: "Zen 1 or 2", 25: "Zen 3", 26: "Zen 5"}.get(family)
    widths = [("avx512f", "AVX-512"), ("avx2", "AVX2, without AVX-512"), ("asimd", "NEON")]
    flags += fields.get("Features", "").split()
    simd = next((text for flag, text in widths if flag in flags), None)
    article = "an" if kind[0] in "AEIOU" else "a"
    text = f"{cores} core{'s' * (cores != 1)} of {article} {kind}"
    return text + (f" ({generation})" if generation else "") + (f" with {simd}" if simd else "")
