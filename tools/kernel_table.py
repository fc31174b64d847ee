"""Makes one line a kernel of what `glimmer bench kernels --device cuda --json FILE` wrote.

    python3 tools/kernel_table.py FILE > TABLE

Prints a table in Markdown for each family: the median in microseconds and the share of the limit in per cent, for each
number of rows. A share above 100 is marked: bytes are counted wrongly, or come from the second-level cache.
"""

import json
import sys


def short(us):
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def main(path):
    with open(path) as file:
        result = json.load(file)
    print(
        f"{result['device']}: read {result['read_gbps']:.0f} GB/s, copy {result['copy_gbps']:.0f} GB/s, "
        f"products {result['tensor_tflops']:.0f} TFLOP/s."
    )
    families = {}
    for row in result["kernels"]:
        kernels = families.setdefault(row["family"], {})
        kernels.setdefault(row["kernel"], {})[row["rows"]] = row
    for family, kernels in families.items():
        rows = sorted({m for cells in kernels.values() for m in cells})
        print(f"\n## {family}\n")
        print("| kernel | " + " | ".join(str(m) for m in rows) + " |")
        print("|---" * (len(rows) + 1) + "|")
        for kernel, cells in kernels.items():
            shown = []
            for m in rows:
                cell = cells.get(m)
                if cell is None:
                    shown.append("")
                    continue
                share = 100 * cell["achieved"]
                mark = "!" if share > 100 else ""
                shown.append(f"{short(cell['us'][0])} ({share:.0f}{mark})")
            print(f"| {kernel} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
