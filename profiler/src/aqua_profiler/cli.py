"""`aqua-profile`: run, steps, show, diff, push, label.

Errors, exit codes and files are those of all commands (`aqua_cli`). Exit code 1 says that the
profile is partial because the budget was spent, or that two profiles differ; 3 that the endpoint
failed: with `run`, what was measured before is still written and printed, marked partial, and can
be resumed. Imports numpy, aiohttp and the rest inside commands, so that `--help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from aqua_cli import (
    CoordinatorToken,
    CoordinatorUrl,
    ExitCode,
    Json,
    Output,
    Plot,
    print_json,
    progress,
    say,
)
from aqua_cli import main as run_program
from aqua_cli.program import DEFAULT_COORDINATOR_URL

if TYPE_CHECKING:
    from aqua_profiler.errors import EndpointError
    from aqua_profiler.spec import BatchSpec
    from aqua_protocol.profile import ModelProfile

app = typer.Typer(
    name="aqua-profile",
    help="Measure what a model can lend or needs under its own workload, and label it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
run = typer.Typer(no_args_is_help=True, help="Measure a deployment.")
app.add_typer(run, name="run")

OPERATION_PATHS: Final = {"completions": "/completions", "chat": "/chat/completions"}

Budget = Annotated[float, typer.Option("--budget-s", min=1, max=86_400, help="Seconds in all.")]
Threshold = Annotated[
    str, typer.Option("--threshold", help="Spare memory from which a model is a producer.")
]
Hbm = Annotated[str | None, typer.Option("--hbm", help="Memory of the GPU, for example 80GB.")]
Hardware = Annotated[str, typer.Option(help="For the provenance; default: this machine.")]
Token = Annotated[
    str | None, typer.Option(envvar="AQUA_PROFILE_TOKEN", help="Bearer token of the server.")
]
ProfileFile = Annotated[Path, typer.Argument(help="A profile.")]


@run.command()
def llm(  # noqa: PLR0917 - a command has as many arguments as options
    endpoint: Annotated[str, typer.Option(help="URL of an OpenAI-compatible server.")],
    model: Annotated[str, typer.Option(help="As the server calls it; 256 characters at most.")],
    lengths: Annotated[
        Path, typer.Option(help="Prompt and output lengths: CSV, or a trace; .gz or not.")
    ],
    ttft_s: Annotated[
        float, typer.Option(min=0.001, help="Limit of the time to first token.")
    ] = 1.0,
    tbt_p99_s: Annotated[
        float, typer.Option(min=0.0001, help="Limit of the p99 of the time between tokens.")
    ] = 0.1,
    ttft_quantile: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="Share of requests that must keep --ttft-s.")
    ] = 0.5,
    budget_s: Budget = 600.0,
    min_rate: Annotated[float, typer.Option(min=0.001, help="Requests/s; no search below.")] = 0.02,
    max_rate: Annotated[
        float, typer.Option(min=0.001, help="Requests/s; no search above.")
    ] = 1000.0,
    step: Annotated[float, typer.Option(min=0.01, help="Of the linear search, requests/s.")] = 0.5,
    precision: Annotated[
        float, typer.Option(min=0.002, max=0.5, help="Relative standard error to reach.")
    ] = 0.018,
    threshold: Threshold = "10GB",
    kv_bytes: Annotated[
        str | None, typer.Option(help="Size of the engine's KV cache per GPU, if it does not say.")
    ] = None,
    model_folder: Annotated[
        Path | None, typer.Option(help="With the model's config.json, to size its KV cache.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, max=1024, help="GPUs of the model.")] = 1,
    hbm: Hbm = None,
    bursts: Annotated[
        str, typer.Option(help="Factors of the stable rate; the first sets needed_bytes.")
    ] = "2,1.5,3",
    burst_s: Annotated[float, typer.Option(min=1, help="Length of a burst.")] = 60.0,
    long_prompt_tokens: Annotated[int, typer.Option(min=0, help="A prompt to have room for.")] = 0,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Prefixes to keep cached.")] = 0,
    api: Annotated[
        Literal["auto", "completions", "chat"], typer.Option(help="Operation to load.")
    ] = "auto",
    token: Token = None,
    stall_s: Annotated[float, typer.Option(min=1, help="Silence that counts as a stall.")] = 30.0,
    seed: Annotated[int, typer.Option(min=0, max=10**6, help="Of arrivals and lengths.")] = 0,
    journal: Annotated[
        Path | None, typer.Option(help="To resume from; default: beside --output.")
    ] = None,
    predicted: Annotated[
        Path | None,
        typer.Option(help="Rate to begin at, a file of `aqua sim stable-rate`; only saves time."),
    ] = None,
    hardware: Hardware = "",
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Find the highest rate that meets the objective, and the memory left over at it."""
    from aqua_profiler.errors import ProfileInvalidError
    from aqua_profiler.llm import profile_llm
    from aqua_profiler.load.lengths import read_lengths
    from aqua_profiler.report.files import provenance
    from aqua_profiler.spec import LatencyObjective, ProfileSpec
    from aqua_protocol import ConfigError, parse_bytes
    from aqua_protocol.prediction import read_prediction

    if min_rate > max_rate:
        message = f"--min-rate {min_rate:g} is above --max-rate {max_rate:g}"
        raise ConfigError(message, remedy="Swap them.")
    if journal is None and output is not None:
        journal = output.with_name(output.name + ".journal")
    workload = read_lengths(lengths)
    if not model or len(model) > 256:  # noqa: PLR2004 - the schema's bound
        raise ProfileInvalidError(f"{model!r} cannot be a model's name", remedy="Give --model.")
    spec = ProfileSpec(
        url=endpoint if api == "auto" else endpoint.rstrip("/") + OPERATION_PATHS[api],
        model=model,
        lengths=workload,
        objective=LatencyObjective(
            ttft_s=ttft_s,
            tbt_s=tbt_p99_s,
            ttft_quantile=ttft_quantile,
            precision=precision,
            step_per_s=step,
            min_rate_per_s=min_rate,
            max_rate_per_s=max_rate,
        ),
        budget_s=budget_s,
        token=token,
        seed=seed,
        threshold_bytes=parse_bytes(threshold),
        tensor_parallel=tensor_parallel,
        hbm_bytes=None if hbm is None else parse_bytes(hbm),
        kv_bytes=None if kv_bytes is None else parse_bytes(kv_bytes),
        model_folder=model_folder,
        bursts=_factors(bursts),
        burst_s=burst_s,
        long_prompt_tokens=long_prompt_tokens,
        prefix_tokens=prefix_tokens,
        stall_s=stall_s,
        journal=journal,
        predicted_per_s=None if predicted is None else read_prediction(predicted).rate_per_s,
        provenance=provenance(workload.digest, hardware=hardware),
    )
    # The search usually ends before its budget does.
    with progress("starting", total=budget_s, quiet=as_json) as shown:
        profile, error = profile_llm(spec, shown)
    _deliver(profile, error, output, plot, as_json=as_json)


Program = Annotated[str | None, typer.Option(help="module:factory; see docs/profiling.md.")]
ModelName = Annotated[str, typer.Option(help="For the profile.")]


@run.command()
def batch(  # noqa: PLR0917 - as above
    model: ModelName,
    program: Program = None,
    endpoint: Annotated[str | None, typer.Option(help="URL that takes a batch by POST.")] = None,
    body: Annotated[str, typer.Option(help='JSON with "$batch" for the size.')] = (
        '{"prompt": "a lighthouse at dawn", "n": "$batch"}'
    ),
    token: Token = None,
    device: Annotated[int, typer.Option(min=0, help="GPU whose memory is read.")] = 0,
    memory_url: Annotated[
        str | None, typer.Option(help="Read memory here instead: used_bytes and total_bytes.")
    ] = None,
    largest: Annotated[int, typer.Option(min=1, max=2**20, help="No batch beyond.")] = 1024,
    budget_s: Budget = 600.0,
    threshold: Threshold = "10GB",
    hbm: Hbm = None,
    hardware: Hardware = "",
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Raise the batch size until throughput saturates; what is free then can be lent."""
    from aqua_profiler.batch import HttpBatchProgram, load, profile_batch
    from aqua_profiler.measure.memory import meter_for, url_meter
    from aqua_protocol import ConfigError

    if (program is None) == (endpoint is None):
        raise ConfigError("nothing to run", remedy="Give one of --program and --endpoint.")
    spec = _batch_spec(model, budget_s, largest, threshold, hbm, hardware)
    work = HttpBatchProgram(endpoint, body, token) if endpoint else load(program or "", "run")
    meter = url_meter(memory_url) if memory_url else meter_for(work, device)
    try:
        with progress("Batches", quiet=as_json) as shown:
            profile, error = profile_batch(
                spec,
                work,
                meter,
                lambda found: shown.update(note=f"{found.size}: {found.items_per_s:.2f} items/s"),
            )
    finally:
        meter.close()
        if isinstance(work, HttpBatchProgram):
            work.close()
    _deliver(profile, error, output, plot, as_json=as_json)


@run.command()
def context(  # noqa: PLR0917 - as above
    model: ModelName,
    program: Annotated[str, typer.Option(help="module:factory; see docs/profiling.md.")],
    long_prompt_tokens: Annotated[int, typer.Option(min=1, help="A prompt to have room for.")],
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Prefixes to keep cached.")] = 0,
    threshold: Threshold = "10GB",
    hbm: Hbm = None,
    hardware: Hardware = "",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Find the swap that a program needs for a long prompt, beyond its own memory."""
    from aqua_profiler.batch import load, profile_context

    spec = _batch_spec(model, 600.0, 1, threshold, hbm, hardware)
    profile = profile_context(spec, load(program, "read"), long_prompt_tokens, prefix_tokens)
    _deliver(profile, None, output, None, as_json=as_json)


@app.command()
def steps(  # noqa: PLR0917 - as above
    endpoint: Annotated[str, typer.Option(help="URL of a running vLLM under Aqua.")],
    model: Annotated[
        str | None, typer.Option(help="As the server calls it; default: the one it serves.")
    ] = None,
    admin_token: Annotated[
        str | None,
        typer.Option(envvar="AQUA_ADMIN_TOKEN", help="That the engine was started with."),
    ] = None,
    token: Token = None,
    budget_s: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds; no point begins after.")
    ] = 600.0,
    folder: Annotated[
        Path | None,
        typer.Option(help="Of profiles; default: ~/.cache/aqua/step-profiles."),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="To resume from; default: beside the profile.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the loads kept from the fit.")] = 0,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure how long an engine's steps take, by chunk, context and batch.

    Co-serving predicts each step by such a profile, and fills the gaps of online requests with
    offline work that still keeps their objectives. Without one it keeps to a small fixed budget.

    The engine measures itself: start vLLM as it will serve, with
    --scheduler-cls aqualib.engines.vllm.AquaScheduler,
    --middleware aqualib.engines.vllm.AquaMiddleware and AQUA_ADMIN_TOKEN set, then

        aqua-profile steps --endpoint http://127.0.0.1:8000 --plot steps.png

    The profile goes into a folder, under a name made of model, engine and GPU, by which it is
    found. Interrupted, or with its budget spent (exit code 1), the same command goes on.
    """
    from aqua_cli import write_json
    from aqua_profiler.report.steps import draw_steps, lines_of_steps
    from aqua_profiler.steps import StepsSpec, profile_steps
    from aqua_schedulers.conserve.profile_folder import DEFAULT_FOLDER
    from aqua_schedulers.conserve.step_time import TOLERATED_SCATTER

    folder = (folder or DEFAULT_FOLDER).expanduser()
    spec = StepsSpec(
        url=endpoint,
        model=model,
        budget_s=budget_s,
        token=token,
        admin_token=admin_token,
        journal=journal,
        folder=folder,
        seed=seed,
    )
    with progress("steps", total=1.0, quiet=as_json, log_every_s=30.0) as shown:
        found = profile_steps(spec, shown)
    profile = found.profile
    if profile is None:
        if as_json:
            error = None if found.error is None else found.error.to_body().model_dump(mode="json")
            print_json({"partial": True, "done": found.done, "of": found.total, "error": error})
        said = found.error.message if found.error else "the budget is spent"
        say(f"aqua-profile: {found.done} of {found.total} points measured: {said}")
        say(f"  {found.error.remedy if found.error else 'The same command goes on from there.'}")
        raise typer.Exit(ExitCode.UNAVAILABLE if found.error else ExitCode.FAILED)
    path = output or folder / found.key.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, profile)
    found.journal.remove()
    if plot is not None:
        draw_steps(profile, found.rows, plot)
        say(str(plot))
    if as_json:
        print_json({**profile.model_dump(), "path": str(path), "loads": len(found.rows)})
    else:
        typer.echo("\n".join([*lines_of_steps(profile, len(found.rows)), "", str(path)]))
    if profile.relative_error > TOLERATED_SCATTER:
        say(
            f"aqua-profile: off by {profile.relative_error:.0%}: was the machine busy? An engine"
            " leaves such a profile for its fixed budget unless steps prove better"
        )


def _batch_spec(
    model: str, budget_s: float, largest: int, threshold: str, hbm: str | None, hardware: str
) -> BatchSpec:
    from aqua_profiler.report.files import provenance
    from aqua_profiler.spec import BatchSpec
    from aqua_protocol import parse_bytes

    return BatchSpec(
        model=model,
        budget_s=budget_s,
        largest=largest,
        threshold_bytes=parse_bytes(threshold),
        hbm_bytes=None if hbm is None else parse_bytes(hbm),
        provenance=provenance(hardware=hardware),
    )


@app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="Profiles; one, but for the placer.")],
    form: Annotated[
        Literal["text", "json", "placer", "kubernetes"], typer.Option("--format", "-f")
    ] = "text",
    servers: Annotated[int, typer.Option(min=1, help="For the placer: how many servers.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="For the placer: GPUs of a server.")] = 8,
    hbm_gb: Annotated[
        float | None,
        typer.Option(min=1e-6, help="For the placer: of a GPU; default: of those profiled on."),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Show a profile: as text, as input of aqua-place, as Kubernetes metadata, as a picture."""
    from aqua_profiler.report.files import read_profile
    from aqua_profiler.report.text import kubernetes, lines_of, placer_input

    profiles = [read_profile(path) for path in files]
    if form == "placer":
        typer.echo(placer_input(profiles, servers, gpus, hbm_gb), nl=False)
    for profile in profiles:
        if as_json or form == "json":
            print_json(profile)
        elif form == "kubernetes":
            print_json({"metadata": kubernetes(profile)})
        elif form == "text":
            typer.echo("\n".join(lines_of(profile)))
        if plot is not None:
            _draw(profile, plot)


@app.command()
def diff(old: ProfileFile, new: ProfileFile, as_json: Json = False) -> None:
    """Say in what two profiles differ; exit 1 if they do."""
    from aqua_profiler.report.files import read_profile
    from aqua_profiler.report.text import differences

    found = differences(read_profile(old), read_profile(new))
    if as_json:
        print_json(found)
    else:
        for name, entry in found.items():
            ratio = f"  (x {entry['ratio']:.3f})" if "ratio" in entry else ""
            typer.echo(f"{name:28s} {entry['old']} -> {entry['new']}{ratio}")
    if found:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def push(
    file: ProfileFile,
    url: CoordinatorUrl = DEFAULT_COORDINATOR_URL,
    token: CoordinatorToken = None,
    as_json: Json = False,
) -> None:
    """Send a profile to the coordinator, where informers find it."""
    from aqua_profiler.report.files import push as send
    from aqua_profiler.report.files import read_profile

    profile = read_profile(file)
    send(profile, url, token)
    if as_json:
        print_json({"model": profile.model, "label": profile.label.value, "url": url})
    else:
        say(f"{url}: the profile of {profile.model}")


@app.command()
def label(
    file: ProfileFile,
    target: Annotated[str, typer.Argument(help="Such as deployment/llama.")],
    namespace: Annotated[
        str | None, typer.Option(help="Of the target; default: this pod's own.")
    ] = None,
    api_url: Annotated[
        str | None, typer.Option(help="Of the API server; default: this cluster's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Label the Kubernetes object whose engine was measured; its pods do not restart.

    In a pod:      aqua-profile label llama.json deployment/llama
    From outside:  kubectl proxy &
                   aqua-profile label llama.json deployment/llama --namespace serving
                   --api-url http://127.0.0.1:8001
    """
    from aqua_profiler.report.files import read_profile
    from aqua_profiler.report.kubernetes_api import KubernetesApi

    profile = read_profile(file)
    if api_url is None:
        api = KubernetesApi.from_pod()
        api.namespace = namespace or api.namespace
    else:
        api = KubernetesApi(api_url, namespace or "default")
    metadata = api.label(profile, target)
    if as_json:
        print_json({"target": target, "namespace": api.namespace, "metadata": metadata})
    else:
        role = metadata["labels"]["aqua.dev/role"]
        say(f"{target} in {api.namespace}: a {role}")


def _factors(text: str) -> tuple[float, ...]:
    from aqua_protocol import ConfigError

    try:
        factors = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        factors = (0.0,)
    if any(not 1 < factor <= 100 for factor in factors):  # noqa: PLR2004 - a sane bound
        raise ConfigError(
            f"--bursts {text!r} are not factors above 1", remedy="Write them as in 2,1.5,3."
        )
    return factors


def _deliver(
    profile: ModelProfile,
    error: EndpointError | None,
    output: Path | None,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    """Write, draw and print a profile; exit with what its being partial means."""
    from aqua_profiler.report.files import write_profile
    from aqua_profiler.report.text import lines_of

    if output is not None:
        write_profile(profile, output)
    if plot is not None:
        _draw(profile, plot)
    if as_json:
        print_json(profile)
    else:
        typer.echo("\n".join(lines_of(profile)))
    if error is not None:
        say(f"aqua-profile: {error.message} [{error.code}]")
        say(f"  {error.remedy}")
        raise typer.Exit(ExitCode.UNAVAILABLE)
    if profile.partial:
        raise typer.Exit(ExitCode.FAILED)


def _draw(profile: ModelProfile, path: Path) -> None:
    from aqua_profiler.report.plot import draw

    draw(profile, path)
    say(str(path))


def entry() -> None:
    """Run as the console script `aqua-profile`."""
    run_program(app, "aqua-profile")
