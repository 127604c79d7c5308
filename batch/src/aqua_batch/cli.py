"""Order a batch file, run it, or serve OpenAI's Batch API to others.

Rejected lines are in the errors file and said on stderr; the others are done, and the status is 0.
An interrupted run is resumed by the same command.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aqua_batch.policies import Policy
from aqua_batch.service.cli import app as service_app
from aqua_cli import Json, parse_document, print_json, progress, replacing, say, write_json
from aqua_cli import main as run_program
from aqua_protocol.errors import ConfigError

if TYPE_CHECKING:
    from aqua_batch.fleet import Fleet
    from aqua_batch.ray_fleet import RayFleet
    from aqua_batch.records import BatchFile, Rejection
    from aqua_batch.tokenization import TokenizedBatch
    from aqua_batch.tokens import Tokenizer

app = typer.Typer(
    name="aqua-batch",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=__doc__,
)

app.add_typer(service_app)

Input = Annotated[Path, typer.Argument(help="Batch file, one request per line.", metavar="IN")]
PolicyOption = Annotated[Policy, typer.Option(help="foresight (default), paper, or a baseline.")]
ErrorsOption = Annotated[
    Path | None, typer.Option(help="Errors file; OUT with .errors.jsonl otherwise.")
]
several = partial(typer.Option, rich_help_panel="Several nodes")
Nodes = Annotated[
    int | None,
    several(
        min=1,
        max=1000,
        help="Run one vLLM on each of so many nodes of a Ray cluster. Without it: one vLLM, here, "
        "and no Ray.",
    ),
]
RayAddress = Annotated[
    str | None,
    several(
        help="The cluster, host:port of its head. RAY_ADDRESS otherwise, or the one that this "
        "machine belongs to."
    ),
]
GpusPerNode = Annotated[
    int | None,
    several(
        min=0,
        help="GPUs of each engine. Its ranks otherwise, or none in a cluster without GPUs.",
    ),
]
CpusPerNode = Annotated[int, several(min=1, help="CPUs that Ray keeps for each engine.")]
WaitS = Annotated[
    float, several(min=0, max=86400, help="How long to wait for Ray to find room for the engines.")
]

LOG_EVERY_S: Final = 10.0
"""Seconds between two lines on a run's progress where stderr is no terminal. Doubled, a log says
half as often where the run is."""


def main() -> None:
    """Entry point of the console script."""
    logging.basicConfig(level=logging.WARNING, format="aqua-batch: %(message)s")
    run_program(app, "aqua-batch")


@app.command()
def order(  # noqa: PLR0917 - Typer's options
    source: Input,
    output: Annotated[Path, typer.Option("--output", "-o", help="The ordered batch file.")],
    tokenizer: Annotated[
        str, typer.Option(help="Hugging Face folder, tiktoken name, or 'bytes'.")
    ] = "bytes",
    gpu: Annotated[str, typer.Option(help="GPU to plan for.")] = "A100-80GB",
    model: Annotated[
        Path | None, typer.Option(help="Model folder or config.json; Llama-3.1-8B otherwise.")
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV tokens that fit, if known better.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt plus output in tokens.")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="Output file of an earlier run, for output lengths.")
    ] = None,
    policy: PolicyOption = Policy.FORESIGHT,
    max_step_tokens: Annotated[
        int, typer.Option(min=1, help="The engine's max_num_batched_tokens.")
    ] = 2048,
    report: Annotated[
        Path | None, typer.Option(help="Plan report; OUT with .plan.json and .plan.png otherwise.")
    ] = None,
    errors: ErrorsOption = None,
    as_json: Json = False,
) -> None:
    """Write IN in an order that blends compute- and memory-bound requests."""
    from aqua_batch.forecast import forecast
    from aqua_batch.policies import policy_for
    from aqua_batch.report import draw_usage, plan_report
    from aqua_batch.target import describe
    from aqua_batch.tokenization import plan, read_lengths
    from aqua_batch.tokens import load_tokenizer

    report_path = report or _beside(output, ".plan.json")
    errors_path = errors or _beside(output, ".errors.jsonl")
    _refuse_same(source, output, report_path, report_path.with_suffix(".png"), errors_path)
    target = describe(gpu, model, capacity_tokens=kv_tokens, longest_tokens=max_model_len)
    loaded = load_tokenizer(tokenizer)
    _say_fallback(loaded)
    batch = _read(source)
    tokenized = _tokenized(
        batch, loaded, target.longest_tokens, target.capacity_tokens, errors_path, to_run=False
    )
    prepared = plan(tokenized, target, read_lengths(lengths) if lengths else {})
    chosen = policy_for(
        policy, prepared, capacity_tokens=target.capacity_tokens, max_step_tokens=max_step_tokens
    )
    with progress("planning", tokenized.prompts.count) as shown:
        course = forecast(
            prepared,
            chosen,
            capacity_tokens=target.capacity_tokens,
            on_progress=lambda done: shown.update(done=done),
        )
    with replacing(output) as file:
        # An entry stands where the first of its rows is admitted.
        owners = dict.fromkeys(tokenized.owner[course.admitted].tolist())
        entries = [tokenized.entries[index] for index in owners]
        for line in batch.lines(entries):
            file.write(line + b"\n")
    summary = plan_report(tokenized, prepared, course, target, loaded, policy.value)
    write_json(report_path, summary)
    draw_usage(course, report_path.with_suffix(".png"))
    if as_json:
        print_json(summary)
    else:
        _print_plan(summary, output, report_path)


@app.command()
def run(  # noqa: PLR0917 - as above
    source: Input,
    output: Annotated[Path, typer.Option("--output", "-o", help="Results, appended as they come.")],
    model: Annotated[str, typer.Option(help="Model folder for vLLM; the same path on each node.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer folder, if it is not the model's.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU that runs it, for the cost model.")] = "A100-80GB",
    policy: PolicyOption = Policy.FORESIGHT,
    engine_options: Annotated[
        str, typer.Option(help="Further arguments of vllm.LLM, as a JSON object.")
    ] = "{}",
    errors: ErrorsOption = None,
    nodes: Nodes = None,
    ray_address: RayAddress = None,
    gpus_per_node: GpusPerNode = None,
    cpus_per_node: CpusPerNode = 1,
    wait_s: WaitS = 60.0,
    as_json: Json = False,
) -> None:
    """Run IN on vLLM; run again to resume.

    Requests that OUT already answers are not run again. Kill it at any moment.

    One engine in this process, from the vLLM of this environment:

        aqua-batch run in.jsonl -o out.jsonl --model ./Llama-3.1-8B

    One engine on each of two machines, which share the file evenly. Both have vLLM, aqua-batch with
    its extra "ray", and the model:

        ray start --head                                  # on the first

        ray start --address FIRST:6379                    # on the second

        aqua-batch run in.jsonl -o out.jsonl --model /models/Llama --nodes 2

    If a machine or an engine dies, the others take over what it had not answered.
    """
    from aqua_batch.batch_run import BatchRun
    from aqua_batch.fleet import LocalFleet
    from aqua_batch.journal import ResultJournal
    from aqua_batch.target import describe
    from aqua_batch.tokens import load_tokenizer
    from aqua_batch.vllm_engine import VllmEngine

    errors_path = errors or _beside(output, ".errors.jsonl")
    _refuse_same(source, output, errors_path)
    options = _options(engine_options)
    if nodes is None and (ray_address is not None or gpus_per_node is not None):
        raise ConfigError(
            "--ray-address and --gpus-per-node are for several nodes",
            remedy="Say how many: --nodes N.",
        )
    batch = _read(source)
    loaded = load_tokenizer(tokenizer or model)
    with ResultJournal(output) as journal, ExitStack() as stack:
        resumed = len(journal.finished)
        options = {"tokenizer": tokenizer or model, **options}
        if nodes is None:
            fleet: Fleet = LocalFleet(VllmEngine(model, options))
        else:
            gpus = gpus_per_node
            fleet = stack.enter_context(
                _ray_fleet(model, options, nodes, ray_address, gpus, cpus_per_node, wait_s)
            )
        facts = fleet.facts
        tokenized = _tokenized(
            batch, loaded, facts.longest_tokens, facts.capacity_tokens, errors_path, to_run=True
        )
        target = describe(
            gpu,
            Path(model) if Path(model).exists() else None,
            capacity_tokens=facts.capacity_tokens,
        )
        started = time.monotonic()
        # By work, not by requests: they differ by orders of magnitude.
        with progress("running", 1.0, log_every_s=LOG_EVERY_S) as shown:
            ran = BatchRun(
                batch,
                tokenized,
                fleet,
                journal,
                model=model,
                cost=target.cost,
                policy=policy,
                on_progress=lambda state: shown.update(done=state.work_done, note=str(state)),
                on_loss=_say,
            ).finish()
        seconds = time.monotonic() - started
        counters = fleet.cache_counters()
    summary = {
        "requests": len(tokenized.entries),
        "ran": ran,
        "resumed": resumed,
        "rejected_lines": len(tokenized.rejections),
        "seconds": seconds,
        "policy": policy.value,
        "nodes": nodes or 1,
        "prefix_cache": {
            "queried_tokens": counters.queried_tokens,
            "hit_tokens": counters.hit_tokens,
        },
    }
    if as_json:
        print_json(summary)
    else:
        typer.echo(
            f"{ran} requests run, {resumed} from before, {seconds:.1f} s; "
            f"prefix cache: {counters.hit_tokens} of {counters.queried_tokens} tokens"
        )


def _ray_fleet(
    model: str,
    options: dict[str, Any],
    nodes: int,
    address: str | None,
    gpus: int | None,
    cpus: int,
    wait_s: float,
) -> RayFleet:
    from aqua_batch.ray_fleet import Placement, RayFleet
    from aqua_batch.vllm_engine import VllmEngine

    size = math.prod(
        int(options.get(name, 1)) for name in ("tensor_parallel_size", "pipeline_parallel_size")
    )
    if size > 1:
        # Inside a placement group vLLM would ask Ray for more places; the engine's are its own.
        options.setdefault("distributed_executor_backend", "mp")
    placement = Placement(
        node_count=nodes,
        gpus=size if gpus is None else gpus,
        gpus_are_asked=gpus is not None,
        cpus=cpus,
        wait_s=wait_s,
    )
    options["tokenizer"] = _anywhere(options["tokenizer"])
    engine = partial(VllmEngine, _anywhere(model), options)
    return RayFleet(engine, placement, address=address, say=_say)


def _anywhere(name: str) -> str:
    """A folder by its full path, as actors start in folders of their own; a name as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _read(source: Path) -> BatchFile:
    from aqua_batch.records import read_batch

    size = source.stat().st_size if source.is_file() else 0
    with progress("reading", size) as shown:
        return read_batch(source, lambda done: shown.update(done=done))


def _tokenized(
    batch: BatchFile,
    tokenizer: Tokenizer,
    longest_tokens: int | None,
    capacity_tokens: int,
    errors_path: Path,
    *,
    to_run: bool,
) -> TokenizedBatch:
    """Tokenise, and write the errors file."""
    from aqua_batch.tokenization import tokenize

    with progress("tokenising", len(batch.entries)) as shown:
        tokenized = tokenize(
            batch,
            tokenizer,
            longest_tokens=longest_tokens,
            capacity_tokens=capacity_tokens,
            to_run=to_run,
            on_progress=lambda done: shown.update(done=done),
        )
    rejections = tokenized.rejections
    _write_rejections(rejections, errors_path)
    if not tokenized.entries:
        first = rejections[0]
        raise ConfigError(
            f"{batch.path}: none of {len(rejections)} lines can be run; "
            f"line {first.line}: {first.message}",
            remedy="Mend the lines; the errors file names each.",
        )
    return tokenized


def _say(text: str) -> None:
    say(f"aqua-batch: {text}")


def _beside(path: Path, ending: str) -> Path:
    """A file that lies beside `path`, named after it."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    return plain.with_suffix(ending)


def _options(text: str) -> dict[str, Any]:
    try:
        return dict(parse_document(text, is_json=True))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"--engine-options is not a JSON object: {error}",
            remedy="For example --engine-options '{\"max_model_len\": 4096}'.",
        ) from error


def _refuse_same(source: Path, *outputs: Path) -> None:
    """No output may be the input, or another output."""
    for output in outputs:
        if output.exists() and source.exists() and output.samefile(source):
            raise ConfigError(
                f"{output} is the input itself", remedy="Write to another file; the input stays."
            )
        if not output.parent.is_dir():
            raise ConfigError(f"no folder {output.parent}", remedy="Make it first.")
    places = [output.resolve() for output in outputs]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} would be written twice", remedy="Name different files.")


def _say_fallback(tokenizer: Tokenizer) -> None:
    if not tokenizer.exact:
        _say(
            "no tokenizer given: planning by bytes. Prefixes are found all the same, token counts "
            "are about four times too high. Say --tokenizer FOLDER for exact plans."
        )


def _write_rejections(rejections: list[Rejection], path: Path) -> None:
    """Write the errors file, and say the first few; no file where nothing is wrong."""
    from aqua_batch.records import write_errors

    if not rejections:
        path.unlink(missing_ok=True)
        return
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        write_errors(file, rejections)
    for rejection in rejections[:5]:
        _say(f"line {rejection.line}: {rejection.message}")
    count = "1 line" if len(rejections) == 1 else f"{len(rejections)} lines"
    _say(f"{count} cannot be run, see {path}")


def _print_plan(summary: dict[str, Any], output: Path, report: Path) -> None:
    time_part, sharing, density = summary["time"], summary["sharing"], summary["density"]
    typer.echo(
        f"{summary['requests']} requests in {summary['policy']} order: {output}\n"
        f"compute density {density['pool']:.2f}, {density['compute_bound_requests']} requests "
        f"compute-bound\n"
        f"prefix sharing {sharing['saved_prompt_share']:.1%} of prompt tokens "
        f"({sharing['of_optimal']:.1%} of optimal)\n"
        f"predicted {time_part['predicted_s']:,.0f} s in {time_part['steps']} steps, "
        f"{time_part['share_of_optimal']:.1%} of the optimum's rate\n"
        f"report: {report}, {report.with_suffix('.png')}"
    )
