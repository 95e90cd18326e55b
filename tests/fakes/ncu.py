"""A stand-in for Nsight Compute: it runs the program under it, and prints a CSV as ncu would.

`FAKE_NCU` says how it fares, and `FAKE_NCU_LOG` names a file to which its arguments are added. What
it prints is of the form that ncu 2025.3 prints for a GH100; the figures are made up. Where it fares
otherwise than `wide` it does not run the program, which imports torch for 1.9 s.
"""

import json
import os
import subprocess
import sys

PEAK = "avg.pct_of_peak_sustained"
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# Metric → unit, value of the first launch, value of the second.
VALUES = {
    "dram__bytes_read.sum": ("byte", "2000000", "1000000"),
    "dram__bytes_write.sum": ("byte", "500000", "250,000"),
    f"gpu__compute_memory_throughput.{PEAK}_elapsed": ("%", "90", "60"),
    f"gpu__dram_throughput.{PEAK}_elapsed": ("%", "88", "58"),
    "gpu__time_duration.sum": ("nsecond", "3000", "1000"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("", "40", "2"),
    "launch__occupancy_limit_blocks": ("block", "32", "32"),
    "launch__occupancy_limit_registers": ("block", "8", "16"),
    "launch__registers_per_thread": ("register/thread", "32", "16"),
    "lts__t_bytes.sum": ("byte", "4000000", "2000000"),
    f"sm__pipe_tensor_cycles_active.{PEAK}_active": ("%", "n/a", "n/a"),
    f"sm__throughput.{PEAK}_elapsed": ("%", "30.5", "10.5"),
    f"sm__warps_active.{PEAK}_active": ("%", "80", "40"),
    STALLED.format("barrier"): ("inst", "0", "0"),
    STALLED.format("long_scoreboard"): ("inst", "12.5", "8.5"),
    STALLED.format("selected"): ("inst", "1", "1"),
    STALLED.format("wait"): ("inst", "1.25", "1.25"),
}
KERNELS = ("first, kernel", "second_kernel")
HEAD = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
HEAD += ["Block Size", "Grid Size", "Device", "CC"]
FORBIDDEN = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
    "Performance Counters on the target device 0. For instructions on enabling permissions and to "
    "get more information see https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
)


def line(cells):
    return ",".join(f'"{cell}"' for cell in cells) + "\n"


def launch(i):
    shape = ["(256, 1, 1)", "(64, 1, 1)", "0", "9.0"]
    return [str(i), "4242", "python3.11", "127.0.0.1", KERNELS[i], "1", "7", *shape]


def wide(metrics, count):
    found = [metric for metric in sorted(metrics) if metric in VALUES]
    text = line([*HEAD, *found]) + line(["" for _ in HEAD] + [VALUES[m][0] for m in found])
    return text + "".join(
        line([*launch(i), *(VALUES[metric][1 + i] for metric in found)]) for i in range(count)
    )


def long(metrics, count):
    """A line a metric, in units that suit the values, as older versions have it."""
    scaled = {"byte": ("Kbyte", 1e-3), "nsecond": ("usecond", 1e-3)}
    text = line([*HEAD, "Section Name", "Metric Name", "Metric Unit", "Metric Value"])
    for i in range(count):
        for metric in sorted(metrics):
            if metric in VALUES:
                unit, *values = VALUES[metric]
                named, by = scaled.get(unit, (unit, 1))
                value = values[i] if by == 1 else f"{float(values[i].replace(',', '')) * by:,}"
                text += line([*launch(i), "Command line profiler metrics", metric, named, value])
    return text


def main(words):
    how = os.environ.get("FAKE_NCU", "wide")
    if log := os.environ.get("FAKE_NCU_LOG"):
        with open(log, "a") as file:
            file.write(json.dumps(words) + "\n")
    if "--version" in words:
        print(
            "NVIDIA (R) Nsight Compute Command Line Profiler\nVersion 2025.3.0.0 (build 36273991)"
        )
        return 0
    if "--query-metrics" in words:
        if how == "unknown":
            return 1
        print("Device NVIDIA H100 80GB HBM3 (GH100)\n" + "-" * 20)
        names = [m.partition(".")[0] for m in VALUES if not m.startswith("launch__")]
        print("\n".join(f"{name:<70} Counter   # of something" for name in names))
        return 0
    program = words.index(sys.executable)
    options, child = words[:program], words[program:]
    metrics = options[options.index("--metrics") + 1].split(",")
    spec = json.loads(child[-1])
    count = 2 if how == "long" and "op" in spec else 1
    text = "==PROF== Connected to process 4242 (python)\n"
    if how == "forbidden" or (how == "forbidden later" and "op" in spec):
        text, code = text + FORBIDDEN, 1
    elif how == "crash" and "op" in spec:
        os.abort()
    elif how == "unknown" and (unknown := [m for m in metrics if m not in VALUES]):
        text += "".join(f"==ERROR== Failed to find metric {metric}\n" for metric in unknown)
        code = 1
    else:
        code = subprocess.run(child, check=False).returncode if how == "wide" else 0
        if code == 0 and how != "nothing":
            text += '==PROF== Profiling "first" - 0: 0%....100% - 9 passes\n'
            text += "==PROF== Disconnected from process 4242\n"
            text += (long if how == "long" else wide)(metrics, count)
        else:
            text += "==WARNING== No kernels were profiled.\n"
    with open(options[options.index("--log-file") + 1], "w") as file:
        file.write(text)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
