"""Definition of the command line: commands, options and error output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from samplebatch import __version__
from samplebatch.cli.terminal import FAILED, guard
from samplebatch.env.registry import DEFAULT_ENVIRONMENT
from samplebatch.errors import MissingExtraError, require
from samplebatch.names import for_terminal

if TYPE_CHECKING:
    from typer import Typer

_HELP = """Collect reinforcement-learning experience into Arrow files, inspect them, and train policies.

[bold]Step an environment in four processes and store the steps:[/bold]

  samplebatch collect mpe2/simple_spread_v3 --workers 4 --steps 10000 --out spread.arrow

[bold]Inspect the file:[/bold]

  samplebatch inspect spread.arrow --html spread.html

[bold]Train a policy and show its learning curve:[/bold]

  samplebatch train ppo CartPole-v1

[bold]Read the file in Python, without copying it:[/bold]

  batch = samplebatch.read_arrow("spread.arrow")
"""

_COLLECT_HELP = """Step an environment in several processes, and write one batch or a dataset.

ENV is an id of Gymnasium or PettingZoo, or [bold]module:function[/bold], a function that creates an environment.

[bold]Examples[/bold]

  samplebatch collect

  samplebatch collect CartPole-v1 --workers 4 --envs-per-worker 8 --episodes 500 --plot episodes.png

  samplebatch collect mpe2/simple_tag_v3 --policy adversary=my_package:chase --policy agent=random --out tag.parquet

  samplebatch collect my_package.arena:make_arena --steps 1000000 --out arena/

Ctrl-C or SIGTERM ends the run early; the steps collected so far are written.
"""

_TRAIN_HELP = """Train a policy by ALGORITHM, in an environment or from data, and show its learning curve.

ALGORITHM is ppo, a2c, impala, appo, reinforce, dqn, c51, qrdqn, rainbow, sac, dsac, td3, ddpg, bc, bcq, cql or iql.
SOURCE is an environment, as for [bold]collect[/bold]; for algorithms that learn from data (bc, bcq, cql, iql), a file,
a dataset or a folder of Parquet files, such as the output of [bold]collect[/bold].

The run's folder contains the options ([bold]train.toml[/bold]), the best policy ([bold]policy.pt[/bold]), the log
([bold]log[/bold], for samplebatch inspect), and a checkpoint, from which a run resumes exactly.

[bold]Examples[/bold]

  samplebatch train ppo CartPole-v1 --steps 50000

  samplebatch train sac Pendulum-v1 --seed 3 --set lr=3e-4 --set max_epochs=20 --out runs/pendulum

  samplebatch train bc cart.parquet --env CartPole-v1 --plot curve.png

  samplebatch train ppo CartPole-v1 --seeds 5 --parallel 2 --plot curve.png

  samplebatch train --config mine.toml

  samplebatch train --resume runs/pendulum --allow-pickle

  samplebatch train dqn --settings

With [bold]--seeds[/bold] the folder contains one such folder per seed ([bold]seed-0[/bold], ...), and the log contains
the mean of the metrics over the seeds and its 95 % interval. A seed that fails does not end the others.

Ctrl-C or SIGTERM ends the run after the current step, saves a checkpoint, and prints how to resume.
"""

_INSPECT_HELP = """Print the contents of a file or dataset: columns, episodes and returns of each policy.

With a second file, compare both column by column.

[bold]Examples[/bold]

  samplebatch inspect rollout.arrow

  samplebatch inspect arena/ --plot episodes.png --html report.html

  samplebatch inspect before.arrow after.arrow
"""

_VERIFY_HELP = """Verify the checksums of a file or folder, over every byte.

PATH is an Arrow, Parquet or HDF5 file, a dataset, or the folder of a replay buffer, which no process may have open.

[bold]Examples[/bold]

  samplebatch verify rollout.arrow

  samplebatch verify replay/

The exit status is 1 if any byte has changed since it was written.
"""

_SERVE_HELP = """Serve replay tables to writers and learners on any machine, over Arrow Flight.

A table is [bold]NAME=KIND:CAPACITY[/], followed by options after commas. KIND is [bold]uniform[/] or
[bold]prioritized[/] for steps, or [bold]fifo[/], [bold]lifo[/], [bold]key[/] or [bold]queue[/] for entire fragments.

[bold]Examples[/bold]

  samplebatch serve --table replay=uniform:1e6 --port 5005

  samplebatch serve --table prio=prioritized:1e6,alpha=0.6,min_size=1e4,samples_per_insert=8 --checkpoint replay/
  --checkpoint-every 300

  samplebatch serve --table rollouts=queue:64 --host 0.0.0.0 --token-file token --tls-cert cert.pem --tls-key key.pem

Only this machine can connect unless --host is given. Tables are restored from the newest checkpoint; Ctrl-C writes a
last checkpoint and exits.
"""

_TOP_HELP = """Show the tables of a replay service: sizes, rates, limits, and which requests are blocked and why.

[bold]Examples[/bold]

  samplebatch top grpc://127.0.0.1:5005

  samplebatch top grpc+tls://replay.example:5005 --token-file token --tls-roots cert.pem --once

Ctrl-C exits.
"""


def main() -> None:
    """Run the command line; entry point of the script `samplebatch`."""
    try:
        require("rich", "cli")
        require("typer", "cli")
    except MissingExtraError as error:
        print(f"Error: {for_terminal(error, 1000)}", file=sys.stderr)
        raise SystemExit(FAILED) from None
    application()(prog_name="samplebatch")


def application() -> Typer:
    """Create the command line application."""
    typer = require("typer", "cli")
    app: Typer = typer.Typer(
        name="samplebatch",
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(value: bool) -> None:
        if value:
            print(f"samplebatch {__version__}")
            raise typer.Exit

    version_option = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Print the version, and exit."
    )
    pickle_option = typer.Option(
        False,
        "--allow-pickle",
        help="Load pickled objects, and policies in .pt and .pt2 files, which runs code. Only from writers you trust.",
    )
    plot_option = typer.Option(None, "--plot", metavar="PICTURE", help="Draw returns and lengths (.png, .svg, .pdf).")

    @app.callback()
    def samplebatch(version: bool = version_option) -> None:
        pass

    @app.command("collect", help=_COLLECT_HELP)
    def collect_command(
        env: str = typer.Argument(DEFAULT_ENVIRONMENT, metavar="ENV", help="Environment to step."),
        workers: int = typer.Option(2, "--workers", "-w", min=1, help="Processes that step environments."),
        envs_per_worker: int = typer.Option(1, "--envs-per-worker", min=1, help="Environments per process."),
        steps: int | None = typer.Option(
            None, "--steps", "-n", min=1, help="Total environment steps of all processes. [dim]\\[default: 1000][/]"
        ),
        episodes: int | None = typer.Option(
            None, "--episodes", min=1, help="Episodes to complete, instead of --steps."
        ),
        policy: list[str] = typer.Option(
            ["random"],
            "--policy",
            metavar="[ID=]POLICY",
            help="Policy: [bold]random[/], [bold]module:function[/], or a file of torch (.pt2, .pt). "
            "For several policies, repeat the option with each id.",
        ),
        seed: int | None = typer.Option(
            None, "--seed", min=0, help="Seed of environments and actions. [dim]\\[default: a random one][/]"
        ),
        out: Path = typer.Option(
            Path("rollout.arrow"),
            "--out",
            "-o",
            help="Output: an Arrow file, a Parquet file (.parquet), or a folder for a dataset, "
            "written during collection.",
        ),
        fragment_length: int = typer.Option(
            200, "--fragment-length", min=1, help="Environment steps per fragment that a worker sends."
        ),
        restarts: int = typer.Option(0, "--restarts", min=0, help="Crashed or hung workers to replace."),
        plot: Path | None = plot_option,
        allow_pickle: bool = pickle_option,
    ) -> None:
        from samplebatch.cli.collecting import Run, collect

        if steps is not None and episodes is not None:
            raise typer.BadParameter("give --steps or --episodes, not both", param_hint="--episodes")
        run = Run(
            environment=env,
            policies=policy,
            workers=workers,
            envs_per_worker=envs_per_worker,
            steps=1000 if steps is None and episodes is None else steps,
            episodes=episodes,
            seed=seed,
            out=out,
            fragment_length=fragment_length,
            restarts=restarts,
            plot=plot,
            allow_pickle=allow_pickle,
        )
        raise typer.Exit(guard(lambda: collect(run)))

    @app.command("inspect", help=_INSPECT_HELP)
    def inspect_command(
        file: Path = typer.Argument(..., metavar="FILE", help="File or dataset written by samplebatch."),
        other: Path | None = typer.Argument(None, metavar="[OTHER]", help="Second file or dataset to compare with."),
        plot: Path | None = plot_option,
        html: Path | None = typer.Option(None, "--html", metavar="PAGE", help="Write an HTML page with the report."),
        allow_pickle: bool = pickle_option,
    ) -> None:
        from samplebatch.cli.collecting import compare, inspect

        if other is not None:
            if plot is not None or html is not None:
                raise typer.BadParameter("--plot and --html must not be given with two files")
            raise typer.Exit(guard(lambda: compare(file, other, allow_pickle=allow_pickle)))
        raise typer.Exit(guard(lambda: inspect(file, plot=plot, html=html, allow_pickle=allow_pickle)))

    @app.command("train", help=_TRAIN_HELP)
    def train_command(
        algorithm: str | None = typer.Argument(None, metavar="[ALGORITHM]", help="Algorithm to train with."),
        source: str | None = typer.Argument(None, metavar="[SOURCE]", help="Environment or data to learn from."),
        config: Path | None = typer.Option(
            None, "--config", metavar="FILE", help="TOML file with algorithm, source and settings, one per line."
        ),
        assignments: list[str] = typer.Option(
            [], "--set", metavar="NAME=VALUE", help="Setting, with precedence over the file's; repeat it for several."
        ),
        settings: bool = typer.Option(False, "--settings", help="Print the algorithm's settings, and exit."),
        env: str | None = typer.Option(None, "--env", help="Test environment, if SOURCE is data."),
        steps: int | None = typer.Option(
            None,
            "--steps",
            "-n",
            min=1,
            help="Total environment steps, or gradient steps if SOURCE is data; sets max_epochs and epoch_num_steps.",
        ),
        workers: int | None = typer.Option(
            None, "--workers", "-w", min=0, help="Worker processes. [dim]\\[default: 0, collect in this one][/]"
        ),
        normalize: bool | None = typer.Option(
            None,
            "--normalize",
            help="Normalize observations by running statistics, and the rewards of on-policy algorithms.",
        ),
        seed: int | None = typer.Option(None, "--seed", min=0, help="Seed of the run. [dim]\\[default: 0][/]"),
        seeds: int | None = typer.Option(
            None, "--seeds", min=1, help="Train that many runs, with the seeds --seed, --seed + 1, and so on."
        ),
        parallel: int | None = typer.Option(
            None, "--parallel", min=1, help="Runs of --seeds at a time. [dim]\\[default: one per processor][/]"
        ),
        out: Path | None = typer.Option(
            None, "--out", "-o", help="The run's folder. [dim]\\[default: runs/ALGORITHM-SOURCE][/]"
        ),
        resume: Path | None = typer.Option(None, "--resume", metavar="FOLDER", help="Resume the run in a folder."),
        plot: Path | None = typer.Option(
            None, "--plot", metavar="PICTURE", help="Draw the learning curves (.png, .svg, .pdf)."
        ),
        allow_pickle: bool = typer.Option(
            False,
            "--allow-pickle",
            help="Load pickled objects, such as a checkpoint's environments, and import environments that a file "
            "names, which runs code. Only from writers you trust.",
        ),
    ) -> None:
        from samplebatch.cli.experiments import resume_any, train_any
        from samplebatch.cli.training import read_training, show_settings

        flags = {
            "algorithm": algorithm, "source": source, "env": env, "steps": steps, "seed": seed, "workers": workers,
            "normalize": normalize, "seeds": seeds, "parallel": parallel,
        }  # fmt: skip
        if resume is not None:
            if any(value is not None for value in (config, steps, workers, seed, seeds, out, normalize)) or assignments:
                raise typer.BadParameter(
                    "options must be omitted with --resume, as the folder contains them; only --parallel, --plot, "
                    "--allow-pickle, and equal ALGORITHM, SOURCE and --env are accepted",
                    param_hint="--resume",
                )
            raise typer.Exit(guard(lambda: resume_any(resume, flags, plot=plot, allow_pickle=allow_pickle)))
        if settings:
            raise typer.Exit(guard(lambda: show_settings(algorithm)))

        def run() -> int:
            options = read_training(config, flags, assignments, allow_pickle=allow_pickle)
            return train_any(options, out, plot=plot, allow_pickle=allow_pickle)

        raise typer.Exit(guard(run))

    @app.command("verify", help=_VERIFY_HELP)
    def verify_command(
        path: Path = typer.Argument(..., metavar="PATH", help="File or folder written by samplebatch."),
    ) -> None:
        from samplebatch.cli.collecting import verify

        raise typer.Exit(guard(lambda: verify(path)))

    token_option = typer.Option(
        None, "--token-file", metavar="FILE", help="File with the token that clients must send."
    )

    @app.command("serve", help=_SERVE_HELP)
    def serve_command(
        table: list[str] = typer.Option(
            ..., "--table", "-t", metavar="NAME=KIND:CAPACITY,...", help="Table to serve; repeat it for several."
        ),
        port: int = typer.Option(0, "--port", "-p", min=0, max=65535, help="Port to listen on, 0 for any free port."),
        host: str = typer.Option("127.0.0.1", "--host", help="Address to listen on."),
        checkpoint: Path | None = typer.Option(
            None, "--checkpoint", metavar="FOLDER", help="Folder of checkpoints, to write and restore."
        ),
        checkpoint_every: float | None = typer.Option(
            None, "--checkpoint-every", metavar="SECONDS", min=1.0, help="Interval between checkpoints."
        ),
        checkpoint_keep: int = typer.Option(
            1, "--checkpoint-keep", min=1, help="Number of newest checkpoints to keep."
        ),
        token_file: Path | None = token_option,
        tls_cert: Path | None = typer.Option(None, "--tls-cert", metavar="FILE", help="Certificate, in PEM."),
        tls_key: Path | None = typer.Option(None, "--tls-key", metavar="FILE", help="Private key, in PEM."),
        metrics_port: int | None = typer.Option(
            None, "--metrics-port", min=0, max=65535, help="Port on this machine that serves Prometheus metrics."
        ),
        allow_pickle: bool = pickle_option,
    ) -> None:
        from samplebatch.cli.serving import Serving, serve

        if checkpoint_every is not None and checkpoint is None:
            raise typer.BadParameter(
                "--checkpoint must be passed with --checkpoint-every", param_hint="--checkpoint-every"
            )
        if (tls_cert is None) != (tls_key is None):
            passed = "--tls-key" if tls_cert is None else "--tls-cert"
            raise typer.BadParameter(f"--tls-cert and --tls-key must be passed together, got only {passed}")
        options = Serving(
            tables=table,
            host=host,
            port=port,
            checkpoint=checkpoint,
            every_s=checkpoint_every,
            keep=checkpoint_keep,
            token_file=token_file,
            tls=None if tls_cert is None or tls_key is None else (tls_cert, tls_key),
            metrics_port=metrics_port,
            allow_pickle=allow_pickle,
        )
        raise typer.Exit(guard(lambda: serve(options)))

    @app.command("top", help=_TOP_HELP)
    def top_command(
        uri: str = typer.Argument(..., metavar="URI", help="Address of the service, as `serve` prints it."),
        interval: float = typer.Option(1.0, "--interval", min=0.05, help="Seconds between two updates."),
        once: bool = typer.Option(False, "--once", help="Print the tables once, after one interval, and exit."),
        token_file: Path | None = token_option,
        tls_roots: Path | None = typer.Option(
            None, "--tls-roots", metavar="FILE", help="Root certificates that verify the service's certificate, in PEM."
        ),
    ) -> None:
        from samplebatch.cli.serving import Top, top

        raise typer.Exit(guard(lambda: top(Top(uri, interval, once, token_file, tls_roots))))

    return app
