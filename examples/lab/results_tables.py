"""Puts the tables of the results into the page of results, between comments that name them.

A table called ``solvers`` goes between the lines ``<!-- table: solvers -->`` and ``<!-- end of table -->``; what stands
there is replaced. ``--check`` changes nothing and fails where the page differs.
"""

import argparse
import importlib
import io
import json
import re
from pathlib import Path
from typing import Any

import bench_report

from timm_ssog.analysis import draw_anytime
from timm_ssog.files import replace_file

RESULTS = Path(__file__).parents[1] / "results"
PAGE = RESULTS / "README.md"

EXPERIMENTS = ("ablation", "exported_speed", "flow", "matched", "solvers")
"""Scripts whose ``table`` makes Markdown of the runs in the results file of their name, and ``setup`` a sentence."""

OTHER_RUNS = {
    "flow-16-epochs": "flow",
    "flow-cifar10": "flow",
    "flow-loops": "flow",
    "warm-start-digits": "warm_start_results",
    "warm-start-cifar10": "warm_start_results",
    "photographs": "photographs",
    "steering": "steering_cost",
}
"""Further results files, and the script that they come from."""

REGION = re.compile(r"^<!-- table: (.+?) -->\n(.*?)^<!-- end of table -->$", re.MULTILINE | re.DOTALL)


def results(name: str) -> dict[str, Any] | None:
    """The content of a results file, None if there is no such file."""
    path = RESULTS / f"{name}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise SystemExit(f"{path} is no results file: {error}") from error


def tables() -> dict[str, str]:
    """All tables there are results for, by the name that the page calls them."""
    found = {}
    for name in EXPERIMENTS:
        if content := results(name):
            script = importlib.import_module(name)
            found[name] = script.table(content["runs"])
            if hasattr(script, "setup"):
                found[f"{name} setup"] = script.setup(content["recipe"], content["runs"])
            if hasattr(script, "anytime_table"):
                found[f"{name} anytime"] = script.anytime_table(content["runs"])
    for name, script in OTHER_RUNS.items():
        if content := results(name):
            found[name] = importlib.import_module(script).table(content["runs"])
    if benchmark := results("benchmark"):
        found["benchmark setup"] = bench_report.setup(benchmark["recipe"], benchmark["runs"])
        for name, text in bench_report.summary(benchmark["recipe"], benchmark["runs"]).items():
            found[f"benchmark {name}"] = text
    return found


def fill(text: str, contents: dict[str, str]) -> str:
    """Replace what stands in the regions of a text.

    Args:
        text: With regions that name a table.
        contents: The tables by name; those without a region are left out.

    Returns:
        The text with all regions filled.

    Raises:
        SystemExit: if a region names no table, or does not end.
    """
    names = [name for name, _ in REGION.findall(text)]
    if (begun := text.count("<!-- table: ")) != len(names):
        raise SystemExit(
            f"{begun} tables begin with '<!-- table: … -->', {len(names)} end with '<!-- end of table -->'."
        )
    if unknown := sorted(set(names) - set(contents)):
        raise SystemExit(f"No results for the table {unknown[0]!r}; there are {', '.join(sorted(contents)) or 'none'}.")
    return REGION.sub(
        lambda region: f"<!-- table: {region[1]} -->\n\n{contents[region[1]]}\n\n<!-- end of table -->", text
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page agrees with the results")
    options = parser.parse_args(argv)
    text = PAGE.read_text(encoding="utf-8")
    filled = fill(text, tables())
    if filled == text:
        print(f"{PAGE} agrees with the results.")
    elif options.check:
        raise SystemExit(f"{PAGE} differs from the results: python examples/lab/results_tables.py")
    else:
        replace_file(PAGE, filled)
        print(f"{PAGE} now holds the tables of the results.")
        if flow := results("flow"):
            picture = io.BytesIO()
            draw_anytime(importlib.import_module("flow").anytime_over_seeds(flow["runs"])).savefig(picture, dpi=120)
            replace_file(RESULTS / "anytime.png", picture.getvalue())


if __name__ == "__main__":
    main()
