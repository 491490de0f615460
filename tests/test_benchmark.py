"""The benchmark and the cost sweep run from end to end, and the rule that picks a form of the operator is sane."""

import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import LAB

from timm_ssog.ops import eager

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
benchmark: Any = importlib.import_module("benchmark")
bench_memory: Any = importlib.import_module("bench_memory")
bench_report: Any = importlib.import_module("bench_report")
bench_speed: Any = importlib.import_module("bench_speed")
exported_speed: Any = importlib.import_module("exported_speed")
results_tables: Any = importlib.import_module("results_tables")
mixing_cost: Any = importlib.import_module("mixing_cost")
runs: Any = importlib.import_module("runs")
markdown_table: Any = importlib.import_module("markdown_table")
turns: Any = importlib.import_module("turns")


def run_example(name: str, *arguments: str) -> str:
    command = [sys.executable, str(LAB / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


CONDITIONS = {"device": "cpu", "threads": 1, "precision": "float32"}
QUICK = ["--quick", "--sizes", "tiny", "--img-sizes", "32"]


def timed(size: str, img_size: int, ms: dict[str, list[float]], **changes: Any) -> dict[str, Any]:
    """A record of times as benchmark.py writes it."""
    cell = {"measure": "inference", "size": size, "setting": "discrete", "img_size": img_size, "batch": 2}
    asked = {"models": list(ms), "seconds": 60.0}
    return {**cell, **asked, "ms": ms, "date": "2026-01-01T00:00:00+00:00", **changes}


def test_benchmark_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "results" / "benchmark.json"
    arguments = [*QUICK, "--settings", "discrete", "ode", "--output", str(output)]
    printed = run_example("benchmark.py", *arguments, "--models", "ssog", "twin", "--measures", "inference", "training")
    assert output.with_suffix(".md").read_text() == printed
    benchmark.main([*arguments, "--measures", "mixing", "cost", "--models", *benchmark.MODELS])
    results = json.loads(output.read_text())
    assert not list(output.parent.glob("*.part"))
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    where = results["recipe"]
    assert where["versions"]["torch"] == torch.__version__
    assert (where["threads"], where["device"], where["precision"]) == (1, "cpu", "float32")
    found = {(record["measure"], record["setting"]): record for record in results["runs"]}
    measures = ("inference", "training", "cost")
    expected = {(measure, setting) for measure in measures for setting in ("discrete", "ode")}
    assert set(found) == expected | {("mixing", "discrete")}
    assert len(results["runs"]) == len(found)
    for (measure, setting), record in found.items():
        assert (record["size"], record["img_size"], record["batch"]) == ("tiny", 32, 49)
        if measure == "cost":
            assert set(record["counts"]) == set(bench_speed.models_of(setting))
        else:
            assert set(record["ms"]) == ({"ssog", "twin", "unfused"} if measure == "mixing" else {"ssog", "twin"})
            assert all(len(times) == turns.LEAST_TURNS for times in record["ms"].values())
            assert all(time > 0 for times in record["ms"].values() for time in times)


def test_memory_figures_are_those_of_the_parts() -> None:
    common: dict[str, Any] = {"size": "tiny", "setting": "looped", "img_size": 32, "batch": 2}
    for model in ("ssog", "twin"):
        parameters = 4 * bench_speed.count(model, "tiny", "looped", 32)["parameters"]
        how = {**common, "model": model, "device": "cpu", "bf16": False}
        inference, training = (bench_memory.measure(**how, training=training) for training in (False, True))
        assert parameters < inference["standing"] < 1.2 * parameters
        assert inference["peak"] > inference["standing"]
        assert inference["saved"] is None
        # weights and two moments between the steps; at the peak gradients, too, or what forward saved
        assert 3 * parameters <= training["standing"] < 3.2 * parameters
        assert training["saved"] > 0
        assert training["peak"] > training["standing"] + max(training["saved"], parameters)
        for figures in (inference, training):
            assert figures["process_peak"] is None or figures["process_peak"] > figures["peak"]


def test_a_memory_figure_comes_from_its_own_process(tmp_path: Path) -> None:
    output = tmp_path / "memory.json"
    benchmark.main([*QUICK, "--models", "ssog", "--measures", "inference memory", "--output", str(output)])
    (record,) = json.loads(output.read_text())["runs"]
    weights = 4 * bench_speed.count("ssog", "tiny", "discrete", 32)["parameters"]
    figures = record["bytes"]["ssog"]
    assert figures["peak"] > figures["standing"] > weights
    if sys.platform == "linux" and figures["process_peak"] is not None:
        assert figures["process_peak"] < bench_memory.process_peak_bytes(), "this one has done more"


def test_unfused_attention_holds_its_scores() -> None:
    common: dict[str, Any] = {"size": "tiny", "setting": "looped", "img_size": 320, "batch": 1, "training": False}
    peaks = {}
    for model in ("ssog", "twin", "unfused"):
        figures = bench_memory.measure(model=model, device="cpu", bf16=False, **common)
        assert figures is not None
        peaks[model] = figures["peak"]
    scores = bench_speed.score_bytes("tiny", 320, 1, training=False)
    assert scores == 2 * 4 * 3 * 400**2
    assert peaks["unfused"] > peaks["twin"] + scores / 2
    assert peaks["ssog"] < peaks["unfused"] - scores / 2


def test_unfused_attention_is_skipped_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench_speed, bench_memory):
        monkeypatch.setattr(module, "free_bytes", lambda device: 100)
    device = torch.device("cpu")
    models = ("ssog", "unfused")
    how = {"batch": 1, "models": models, "device": device, "bf16": False}
    how |= {"clock": turns.wall_clock, "seconds": 0.0, "advance": lambda share: None}
    assert set(bench_speed.measure_models("tiny", "ode", 32, training=False, **how)) == {"ssog"}
    assert set(bench_speed.measure_mixing("tiny", 32, **how)) == {"ssog"}
    task = {"model": "unfused", "size": "tiny", "img_size": 32, "batch": 1, "training": True, "device": "cpu"}
    assert bench_memory.measure_apart(task) is None


def test_models_are_what_they_are_called() -> None:
    twin, unfused = (bench_speed.create(model, "tiny", "looped").eval() for model in ("twin", "unfused"))
    assert twin.blocks[0].mixer.fused_attn  # type: ignore[index]
    assert not unfused.blocks[0].mixer.fused_attn  # type: ignore[index]
    assert bench_speed.create("twin", "tiny", "ode", "meta").blocks[0].mixer.fused_attn, "the switch is turned back"  # type: ignore[index]
    unfused.load_state_dict(twin.state_dict())
    images = torch.randn(1, 3, 48, 32)
    torch.testing.assert_close(unfused(images), twin(images), rtol=1e-4, atol=1e-5)
    assert type(bench_speed.create("timm", "tiny", "discrete", "meta")).__name__ == "VisionTransformer"
    assert bench_speed.models_of("ode", ("ssog", "timm")) == ("ssog",)


def test_counts_are_those_of_the_definition() -> None:
    dim, side, blocks = 192, 16, 12  # a grid on which the operator is not written out
    tokens = side**2
    counts = {
        model: bench_speed.count(model, "tiny", setting, 16 * side)
        for model, setting in (("ceiling", "discrete"), ("ssog", "ode"), ("twin", "looped"), ("unfused", "looped"))
    }
    linear = tokens * blocks * 2 * (2 + 8) * dim**2 + tokens * 2 * 768 * dim + 2 * dim * 1000
    assert counts["ceiling"]["flops"] == linear
    # 4 components; attention has two more projections, and two products
    assert counts["ssog"]["flops"] == linear + blocks * 2 * 4 * tokens * (side + side) * dim
    assert counts["twin"]["flops"] == linear + blocks * tokens * (2 * 2 * dim**2 + 2 * 2 * tokens * dim)
    assert counts["twin"] == counts["unfused"]
    assert counts["ssog"]["parameters"] < counts["twin"]["parameters"] < counts["ceiling"]["parameters"]


def test_calls_take_turns_and_what_runs_out_of_memory_drops_out() -> None:
    log: list[str] = []
    now = iter(range(1000))

    def huge() -> None:
        if log.count("b") == 2:
            raise torch.OutOfMemoryError
        log.append("huge")

    calls = {"a": lambda: log.append("a"), "huge": huge, "b": lambda: log.append("b")}
    shares: list[float] = []
    how: Any = {"advance": shares.append}
    times = turns.take_turns(calls, timer=turns.timer(lambda: next(now)), seconds=9.0, **how)
    # three seconds for the first turn, so three turns in all, the first among them
    assert times == {"a": [1000.0] * 3, "b": [1000.0] * 3}
    assert log == ["a", "huge", "b", "a", "huge", "b", "a", "b"]
    assert sum(shares) == pytest.approx(1)

    log.clear()
    times = turns.take_turns({"b": calls["b"]}, timer=turns.timer(lambda: next(now)), seconds=7.0, **how)
    assert len(times["b"]) == 7, "as many turns as there is time for"
    assert len(log) == 8, "and one before them that does not count"

    log.clear()
    clock = iter([0, 1, 1, 21, 21, 22] + [1 + n for n in range(1000)])
    calls = {name: (lambda name=name: log.append(name)) for name in ("ssog", "slow", "ceiling")}
    times = turns.take_turns(calls, timer=turns.timer(lambda: next(clock)), seconds=10.0, **how)
    # the slow one takes twenty of 22 seconds: the other two get as much time as they would alone
    assert {name: len(found) for name, found in times.items()} == {"ssog": 5, "slow": 3, "ceiling": 5}
    assert log == ["ssog", "slow", "ceiling"] * 3 + ["ssog", "ceiling"] * 2
    assert sum(shares) == pytest.approx(3)
    assert bench_report.ratios({"ms": times}, "slow") == [20.0, 1.0, 1.0], "pairs are of the same turn"
    assert bench_report.turns({"ms": times}) == "5 (3)"


def test_short_calls_are_repeated_and_what_fails_can_drop_out() -> None:
    made: list[str] = []
    repeats: list[int] = []
    left_out: list[str] = []

    def timer(call: Any, count: int) -> float:
        repeats.append(count)
        for _ in range(count):
            call()
        return 0.25

    def breaks() -> None:
        raise ValueError("broken")

    def drops(name: str, error: Exception) -> bool:
        left_out.append(f"{name}: {error}")
        return True

    calls = {"a": lambda: made.append("a"), "breaks": breaks}
    times = turns.take_turns(calls, timer=timer, turns=2, sample_seconds=1.0, drops=drops)
    # one call to set up, one to see how long it takes, and two samples of a second
    assert repeats == [1, 1, 1, 4, 4]
    assert times == {"a": [250.0, 250.0]}
    assert left_out == ["breaks: broken"]
    assert len(made) == 10
    with pytest.raises(ValueError, match="broken"):
        turns.take_turns({"breaks": breaks}, timer=timer, turns=1)


def test_tables_have_as_many_cells_as_columns() -> None:
    drawn = markdown_table.table(["a", "b"], [[1, "x"], ["", markdown_table.number(None, ".2f")]])
    assert drawn == "| a | b |\n|---|---|\n| 1 | x |\n|  | - |"
    assert markdown_table.table(["a"], []) == "| a |\n|---|"
    with pytest.raises(ValueError, match="Expected 2 cells for the columns a, b, got"):
        markdown_table.table(["a", "b"], [["only one"]])


def test_an_interrupted_benchmark_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Any] = []

    def measure(cell: Any, options: Any, advance: Any) -> dict[str, Any]:
        if len(measured) == 2:
            measured.append(None)
            raise KeyboardInterrupt
        measured.append(cell)
        return timed(cell.size, cell.img_size, {"ssog": [1.0], "twin": [2.0]}, setting=cell.setting)

    monkeypatch.setattr(benchmark, "measure", measure)
    output = tmp_path / "benchmark.json"
    arguments = ["--sizes", "tiny", "small", "--settings", "discrete", "ode", "--img-sizes", "224"]
    arguments += ["--measures", "inference", "--models", "ssog", "twin", "--output", str(output)]
    with pytest.raises(SystemExit, match=r"2 cells are in .*resumes"):
        benchmark.main(arguments)
    benchmark.main(arguments)
    cells = [(record["size"], record["setting"]) for record in json.loads(output.read_text())["runs"]]
    assert cells == [("tiny", "discrete"), ("tiny", "ode"), ("small", "discrete"), ("small", "ode")]
    assert len(measured) == 5
    benchmark.main(arguments)
    assert len(measured) == 5, "all there: only the tables are written"
    assert "| 2.00 (2.00 to 2.00) |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"another recipe \(threads, clock\)"):
        benchmark.main([*arguments, "--threads", "2"])

    benchmark.main([*arguments, "--models", "ssog", "--seconds", "1"])
    assert len(measured) == 5, "less than what is there"
    benchmark.main([*arguments, "--sizes", "small", "--seconds", "90"])
    assert len(measured) == 7, "times of fewer seconds than asked for are no answer"
    benchmark.main([*arguments, "--sizes", "small", "--models", "ssog", "timm", "--settings", "discrete"])
    assert len(measured) == 8, "nor are those without one of the models"
    assert len(json.loads(output.read_text())["runs"]) == 4, "and they give way"


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"recipe": null, "runs": []}', '{"recipe": {}, "runs": null}', '{"recipe": {}, "runs": [{"a": 1}]}'],
)
def test_what_is_not_a_results_file_is_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match="holds no results of this script"):
        benchmark.main([*QUICK, "--output", str(path)])
    assert path.read_text() == content
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit, match="holds no results of this script"):
        benchmark.main([*QUICK, "--output", str(path)])


def test_an_output_that_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "measure", lambda *_: pytest.fail("measured before the file was looked at"))
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder.json", tmp_path / "file" / "results.json"):
        with pytest.raises(SystemExit, match="cannot be written"):
            benchmark.main([*QUICK, "--output", str(path)])
    with runs.claimed(tmp_path / "taken.json"), pytest.raises(SystemExit, match="Another process is writing"):
        benchmark.main([*QUICK, "--output", str(tmp_path / "taken.json")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.json"], "and no trace is left"


def test_a_process_that_the_system_kills_for_memory_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"model": "ssog", "size": "tiny", "img_size": 32, "batch": 1, "training": False, "device": "cpu"}
    ends = iter([subprocess.CompletedProcess([], 1, "", "no such thing"), subprocess.CompletedProcess([], -9, "", "")])
    monkeypatch.setattr(bench_memory.subprocess, "run", lambda *_, **__: next(ends))
    with pytest.raises(SystemExit, match="no such thing"):
        bench_memory.measure_apart(task)
    assert bench_memory.measure_apart(task) is None


def test_too_little_memory_on_the_cpu_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 60)
    assert turns.is_out_of_memory(failure.value)
    assert not turns.is_out_of_memory(RuntimeError("shapes do not fit"))


def test_ratios_are_medians_within_a_turn() -> None:
    record = timed("tiny", 224, {"ssog": [1.0, 10.0, 2.0], "twin": [3.0, 20.0, 5.0]})
    assert bench_report.speed_up(record, "twin") == 2.5
    assert bench_report.throughput(record, "ssog") == 1000.0
    assert "| - | 2.50 (2.00 to 3.00) | - | - | 3 |" in bench_report.tables(CONDITIONS, [record])["inference"]
    assert bench_report.speed_up(record, "ceiling") is None
    assert bench_report.throughput(record, "ceiling") is None


def test_growth_is_the_exponent_of_the_tokens() -> None:
    records = [
        timed("base", px, {"ssog": [3e-4 * tokens**1.5], "twin": [tokens**2.0]}, measure="mixing", batch=1)
        for px, tokens in ((224, 196), (512, 1024), (1024, 4096))
    ]
    assert bench_report.growth(records, "base", "ssog") == pytest.approx(1.5)
    assert bench_report.growth(records, "base", "twin") == pytest.approx(2.0)
    assert bench_report.growth(records, "base", "unfused") is None
    assert bench_report.growth(records[:2], "base", "ssog") is None, "two points are no fit"
    assert "| base | 1.50 | 2.00 | - |" in bench_report.tables(CONDITIONS, records)["growth"]


def test_targets_are_judged() -> None:
    def taken(peak: int, process_peak: int | None) -> dict[str, Any]:
        return {"standing": 1, "peak": peak, "saved": None, "process_peak": process_peak}

    memory = {"ssog": taken(30, 90), "twin": taken(40, 80), "unfused": taken(100, None)}
    records = [
        timed("tiny", 1024, {"ssog": [1.0], "twin": [3.4], "ceiling": [0.89]}),
        timed("base", 1024, {"ssog": [1.0], "twin": [2.2], "ceiling": [0.87]}),
        timed("small", 224, {"ssog": [1.0], "ceiling": [0.79]}, measure="training"),
        {**timed("small", 1024, {}), "measure": "inference memory", "setting": "ode", "bytes": memory},
    ]
    verdicts = {(verdict["target"], verdict["where"]): verdict for verdict in bench_report.judge(records)}
    met = {f"{target} {verdict['bound']} {where}": verdict["met"] for (target, where), verdict in verdicts.items()}
    assert met == {
        "inference at 1024 px: throughput to ceiling, ≥ 0.88 tiny, discrete": True,
        "inference at 1024 px: throughput to ceiling, ≥ 0.88 base, discrete": False,
        "training at 224 px: throughput to ceiling, ≥ 0.8 small, discrete": False,
        "inference at 1024 px, tiny: throughput to twin, ≥ 3.5 tiny, discrete": False,
        "inference at 1024 px, base: throughput to twin, ≥ 2.1 base, discrete": True,
        "peak memory at 1024 px, tensors: to twin, ≤ 1.0 small, ode": True,
        "peak memory at 1024 px, whole process: to twin, ≤ 1.0 small, ode": False,
        "peak memory at 1024 px, tensors: to twin, unfused, ≤ 0.4 small, ode": True,
    }
    table = bench_report.tables(CONDITIONS, records)["targets"]
    assert "throughput to ceiling, ≥ | 0.88 | 0.87 to 0.89 | 1 of 2 | base, discrete (0.8700) |" in table
    assert "targets" not in bench_report.tables({**CONDITIONS, "threads": 2}, records)
    assert bench_report.tables(CONDITIONS, []) == {}


def test_tables_say_what_was_not_measured_and_what_does_not_fit() -> None:
    figures = {"standing": 1, "peak": 3 << 20, "saved": None, "process_peak": 5 << 20}
    record = timed("base", 1024, {}, measure="training memory")
    record["bytes"] = {"ssog": figures, "unfused": None}
    table = bench_report.tables(CONDITIONS, [record])["training memory"]
    assert table.splitlines()[-1] == "| base, discrete | 1024 | 2 | 3 (5) | - | does not fit | - | - | - | - |"
    record = timed("base", 1024, {"ssog": [4.0, 4.0]})
    table = bench_report.tables(CONDITIONS, [record])["inference"]
    assert table.splitlines()[-1] == "| base, discrete | 1024 | 2 | 500.00 | - | - | - | - | 2 |"


def test_summary_leaves_out_the_sizes_in_between() -> None:
    records = [timed("base", px, {"ssog": [4.0]}) for px in (224, 384, 1024)]
    assert "| 384 |" in bench_report.tables(CONDITIONS, records)["inference"]
    summary = bench_report.summary(CONDITIONS, records)["inference"]
    assert "| 384 |" not in summary
    assert "| 224 |" in summary
    assert "| 1024 |" in summary


def test_readme_regions_are_filled() -> None:
    text = "before\n<!-- table: a -->\nold\n<!-- end of table -->\nafter <!-- not one -->\n"
    filled = results_tables.fill(text, {"a": "| \\1 |"})
    assert filled == "before\n<!-- table: a -->\n\n| \\1 |\n\n<!-- end of table -->\nafter <!-- not one -->\n"
    assert results_tables.fill(filled, {"a": "| \\1 |"}) == filled
    assert results_tables.fill(text + text, {"a": "x", "b": "y"}).count("\n\nx\n\n") == 2
    with pytest.raises(SystemExit, match="No results for the table 'a'; there are b"):
        results_tables.fill(text, {"b": ""})
    with pytest.raises(SystemExit, match="2 tables begin"):
        results_tables.fill(text + "<!-- table: a -->\n", {"a": ""})


def test_readme_script_writes_or_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: ablation -->\n<!-- end of table -->\n")
    monkeypatch.setattr(results_tables, "PAGE", readme)
    with pytest.raises(SystemExit, match="differs"):
        results_tables.main(["--check"])
    results_tables.main([])
    assert "| attention twin |" in readme.read_text()
    results_tables.main(["--check"])
    assert "agrees" in capsys.readouterr().out


def test_saved_bytes_count_every_storage_once() -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5, bias=False), torch.nn.Tanh())
    images, labels = torch.randn(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64)
    # tanh keeps its output, the loss its log-softmax, the labels and the weight of all of them; the images are not ours
    log_softmax, output, total_weight = 4 * 5 * 4, 4 * 5 * 4, 4
    assert bench_memory.saved_bytes(network, images, labels) == log_softmax + output + labels.nbytes + total_weight


def test_batches_hold_the_pixels_of_four_images_of_224() -> None:
    assert [benchmark.batch_size(size) for size in (112, 224, 512, 1024)] == [16, 4, 1, 1]


def test_a_gpu_starts_from_a_larger_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert benchmark.arguments(["--device", "cuda"]).batch_size == 128
    assert benchmark.arguments([]).batch_size == 4


def test_bfloat16_is_what_the_models_compute_in() -> None:
    seen = []
    network: Any = timm.create_model("vit_ssog_tiny", embed_dim=24, depth=1, num_heads=1)
    network.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    before = network.head.weight.detach().clone()
    bench_speed.training_step(network, bf16=True)(torch.randn(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64))
    assert seen == [torch.bfloat16]
    assert network.head.weight.dtype == torch.float32
    assert not torch.equal(before, network.head.weight)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--img-sizes", "100"],
        ["--threads", "0"],
        ["--sizes", "huge"],
        ["--batch-size", "0"],
        ["--seconds", "-1"],
        ["--seconds", "nan"],
        ["--device", "cuda:99"],
        ["--device", "abacus"],
        ["--output", "report.md"],
        ["--device", "meta"],
        ["--measures", "beauty"],
    ],
)
def test_benchmark_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as failure:
        benchmark.main(arguments)
    assert failure.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_mixing_cost_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "cost.json"
    printed = run_example("mixing_cost.py", "--quick", "--rounds", "1", "--output", str(output))
    records = json.loads(output.read_text())["runs"]
    assert {record["pass"] for record in records} == {"forward", "backward"}
    assert all(record["dense"] > 0 and record["stacked"] > 0 for record in records)
    assert "| fitted |" in printed


def test_fit_finds_constants_without_regret() -> None:
    stacked_cost, build_cost = eager.STACKED_COST, eager.BUILD_COST
    records = [
        {"pass": "forward", "grid": [size, size], "batch": batch, "head_dim": 64, "components": 4}
        for size in (7, 14, 20, 32)
        for batch in (1, 8, 64)
    ]
    with mixing_cost.weights(30.0, 200.0):
        for record in records:
            dense = mixing_cost.picks_dense(record)
            record.update(dense=1.0 if dense else 2.0, stacked=2.0 if dense else 1.0)
    assert mixing_cost.regret(records, 0.0, 0.0) > 0
    assert mixing_cost.regret(records, *mixing_cost.fit(records)) == 0
    assert stacked_cost == eager.STACKED_COST
    assert build_cost == eager.BUILD_COST


@pytest.mark.parametrize("backward", [False, True])
def test_small_grids_are_dense_and_large_ones_stacked(backward: bool) -> None:
    for batch in (4, 64):
        assert eager.prefers_dense(batch, 7, 7, 64, 4, backward=backward)
    for batch in (1, 64):
        assert not eager.prefers_dense(batch, 32, 32, 64, 4, backward=backward)


def test_exported_models_take_turns_in_all_runtimes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "exported.json"
    exported_speed.main(["--sizes", "tiny", "--img-sizes", "32", "--seconds", "0", "--output", str(output)])
    content = json.loads(output.read_text())
    (record,) = content["runs"]
    assert content["recipe"]["precision"] == "float32"
    assert list(record["milliseconds"]) == list(exported_speed.RUNTIMES)
    assert {"PyTorch", "ONNX Runtime"} <= set(exported_speed.RUNTIMES)
    printed = capsys.readouterr()
    assert f"onnxruntime {record['versions']['onnxruntime']}" in printed.out
    for runtime, times in record["milliseconds"].items():
        assert set(times) == {"ssog", "twin", "timm"}
        assert [len(found) for found in times.values()] == [3, 3, 3]
        assert f"| tiny | 32 | {runtime} | {statistics.median(times['ssog']):.0f} |" in printed.out
    assert exported_speed.speed_up(record, "PyTorch", "twin") > 0
    assert ("OpenVINO is skipped" in printed.err) == ("OpenVINO" not in exported_speed.RUNTIMES)


def test_an_interrupted_comparison_of_exports_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[str, int]] = []

    def measure(size: str, img_size: int, seconds: float, advance: Any) -> dict[str, Any]:
        if len(measured) == 1:
            measured.append(("interrupted", 0))
            raise KeyboardInterrupt
        measured.append((size, img_size))
        times = {"ssog": [1.0], "twin": [3.0], "timm": [2.0]}
        cell = {"size": size, "img_size": img_size, "seconds": seconds, "load": 1.5, **runs.provenance()}
        return {**cell, "milliseconds": dict.fromkeys(exported_speed.RUNTIMES, times)}

    monkeypatch.setattr(exported_speed, "measure", measure)
    command = ["--sizes", "tiny", "small", "--img-sizes", "224", "--output", str(tmp_path / "exported.json")]
    with pytest.raises(SystemExit, match=r"1 cells are in .*resumes"):
        exported_speed.main(command)
    exported_speed.main(command)
    assert measured == [("tiny", 224), ("interrupted", 0), ("small", 224)]
    exported_speed.main([*command, "--seconds", "1"])
    assert len(measured) == 3, "less than what is there"
    monkeypatch.setattr(exported_speed, "RUNTIMES", (*exported_speed.RUNTIMES, "another"))
    exported_speed.main(command)
    assert measured[3:] == [("tiny", 224), ("small", 224)], "a runtime that was missing is measured now"


def test_runtimes_that_answer_differently_are_not_timed() -> None:
    exact = torch.tensor([[1.0, -2.0]])
    exported_speed.check_answers({"PyTorch": exact, "R": (exact * (1 + 1e-6)).numpy()})
    for wrong in (exact * 1.1, exact * float("nan")):
        with pytest.raises(SystemExit, match=r"Expected the logits of R within 0\.001 of PyTorch's, got"):
            exported_speed.check_answers({"PyTorch": exact, "R": wrong.numpy()})


@pytest.mark.parametrize("arguments", [["--img-sizes", "100"], ["--sizes", "huge"], ["--seconds", "-1"]])
def test_comparison_of_exports_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        exported_speed.main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_speed_up_is_the_median_ratio_within_turns() -> None:
    record = {"milliseconds": {"R": {"ssog": [1.0, 2.0, 4.0], "twin": [3.0, 2.0, 8.0]}}}
    assert exported_speed.speed_up(record, "R", "twin") == 2.0
