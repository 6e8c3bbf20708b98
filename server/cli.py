"""The command line: `longtake demo`, `serve`, `generate`, `scene`, `sessions`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import httpx
import typer
from pydantic import ValidationError
from rich.console import Console

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import CHUNK_FRAMES
from longtake.client import Client, ReplayError, Retry, ServerProblem
from longtake.server.failing import errors, fail, reason
from longtake.server.private import ServerDiedError, private_server
from longtake.server.settings import Settings, StartError
from longtake.server.trajectory_cli import trajectory_app

SCENE_ACTIONS = "w-48,d-48,a-48,w-48"

app = typer.Typer(
    help="Serve world models whose takes never have to end.", no_args_is_help=True, pretty_exceptions_enable=False
)
sessions_app = typer.Typer(help="Look at sessions, fork, rewind and drop them.", no_args_is_help=True)
app.add_typer(sessions_app, name="sessions")
app.add_typer(trajectory_app, name="trajectory")
console = Console()


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(version("longtake"), highlight=False)
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Serve world models whose takes never have to end."""


API_KEY_VARIABLE = "LONGTAKE_API_KEY"
"""The key that commands call a server with."""

ServerOption = Annotated[
    str | None, typer.Option("--server", help="URL of a running server; without it a private one is started.")
]
DataDirOption = Annotated[Path | None, typer.Option(help="Where the embedded store keeps its files.")]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Seed of the noise from there on; left out, the one in force there.")
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the video and the store.")] = Path(
        "longtake-demo"
    ),
) -> None:
    """Start a take, kill the server, start it again, go on: the same frames, bit for bit."""
    from longtake.server.demo import DemoFailedError, run_demo

    with _friendly():
        try:
            run_demo(out, console)
        except DemoFailedError as error:
            fail(str(error), error)


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to serve.")] = None,
    state_url: Annotated[
        str | None, typer.Option(help="redis://, rediss://, unix:// or redis+sentinel:// URL of the session store.")
    ] = None,
    data_dir: DataDirOption = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs: cpu or cuda.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Allow a non-loopback address without API keys.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    while_stdin_open: Annotated[bool, typer.Option("--while-stdin-open", hidden=True)] = False,
) -> None:
    """Serve sessions over HTTP."""
    from longtake.server.serve import serve as run_server

    given = {
        "host": host,
        "port": port,
        "model": model,
        "state_url": state_url,
        "data_dir": data_dir,
        "device": device,
        "insecure": insecure,
        "log_level": log_level,
    }
    # a private server tells the one who started it, who listens to its standard output
    with _friendly(console if while_stdin_open else errors):
        settings = Settings.model_validate(
            Settings().model_dump() | {name: value for name, value in given.items() if value is not None}
        )
        run_server(settings, while_stdin_open=while_stdin_open)


@app.command()
def generate(
    image: Annotated[Path | None, typer.Argument(help="First frame: PNG, JPEG or WebP. Not with --session.")] = None,
    trajectory: Annotated[
        Path | None, typer.Option(help="Camera path; row k is frame k, row 0 the image's: .npy [F,4,4] or --format.")
    ] = None,
    format: Annotated[str, typer.Option(help="Syntax of the trajectory, see docs/trajectories.md.")] = "auto",  # noqa: A002
    actions: Annotated[str | None, typer.Option(help="Keys and frames, such as w-48,dw-24.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="MP4 to write.")] = Path("out.mp4"),
    session: Annotated[str | None, typer.Option(help="Go on with this session instead of beginning one.")] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="New frames; all of the camera when left out.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="What the scene is; with --session, from the next chunk on.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the noise.")] = None,
    intrinsics: Annotated[
        str | None, typer.Option(help="fx,fy,cx,cy or a .npy of [4] or [F,4], pixels of the image.")
    ] = None,
    intrinsics_size: Annotated[str | None, typer.Option(help="WxH that the intrinsics belong to.")] = None,
    pad: Annotated[bool, typer.Option("--pad", help="Hold the last pose until the last chunk is whole.")] = False,
    server: ServerOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Walk through an image along a path, and write the video."""
    from longtake.server.generate import Walk, run_walk

    with _friendly(), _about(session):
        walk = Walk(
            *(
                image,
                session,
                trajectory,
                format,
                actions,
                frames,
                prompt,
                seed,
                intrinsics,
                intrinsics_size,
                pad,
                output,
                server,
                data_dir,
            )
        )
        with _client(server, data_dir) as client:
            run_walk(client, walk, console)


@app.command()
def scene(
    seed: Annotated[
        int, typer.Option(min=0, max=2**31, help="Which scene; what stands in the way of the path is left out.")
    ] = 7,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write into.")] = Path(),
    actions: Annotated[
        str | None, typer.Option(help=f"Keys and frames of the path; {SCENE_ACTIONS} when left out.")
    ] = None,
    frames: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Draw a path of so many new frames by the seed instead.")
    ] = None,
) -> None:
    """Draw a scene such as tiny-world was trained on: a first frame, a camera path and a prompt."""
    from longtake.server.scene import run_scene

    with _friendly():
        if actions is not None and frames is not None:
            raise ProblemError("invalid_request", "give either --actions or --frames", "frames")
        path = frames if frames is not None else SCENE_ACTIONS if actions is None else actions
        run_scene(seed, path, out, console)


@sessions_app.command("ls")
def list_sessions(server: ServerOption = None, data_dir: DataDirOption = None) -> None:
    """List sessions, newest first."""
    with _friendly(), _client(server, data_dir) as client:
        found = None
        for found in client.sessions():
            counts = f"{found.next_chunk:>5} chunks {found.pending_poses:>2} pending"
            line = f"{found.id}  {found.created_at:%Y-%m-%d %H:%M:%S}  {found.model}  {counts}  {found.prompt[:40]}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if found is None:
            errors.print(_nothing_there(server, data_dir), highlight=False, markup=False, soft_wrap=True)


@sessions_app.command("show")
def show_session(session: str, server: ServerOption = None, data_dir: DataDirOption = None) -> None:
    """Show where a session stands, and beside it (on standard error) the tree of its forks."""
    from longtake.server.session_tree import family_tree

    with _friendly(), _about(session), _client(server, data_dir) as client:
        shown = client.session(session)
        console.print_json(shown.model_dump_json())
        if (tree := family_tree(client, shown)) is not None:
            errors.print(tree, highlight=False, soft_wrap=True)


@sessions_app.command("fork")
def fork_session(
    session: str,
    from_chunk: Annotated[int, typer.Option(min=-1, help="Last chunk that both share; -1 for none.")],
    seed: SeedOption = None,
    server: ServerOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Begin a second session where one stood after a chunk; prints its id."""
    with _friendly(), _about(session), _client(server, data_dir) as client:
        fork = client.fork(session, from_chunk, seed=seed)
        console.print(fork.id, highlight=False, soft_wrap=True)


@sessions_app.command("rewind")
def rewind_session(
    session: str,
    to_chunk: Annotated[int, typer.Option(min=-1, help="Last chunk that stays; -1 for none.")],
    seed: SeedOption = None,
    server: ServerOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Take a session back to where it stood after a chunk; later chunks are given up."""
    with _friendly(), _about(session), _client(server, data_dir) as client:
        back = client.rewind(session, to_chunk, seed=seed)
        console.print(f"{back.id}: the next chunk is {back.next_chunk}", highlight=False, soft_wrap=True)


@sessions_app.command("video")
def session_video(
    session: str,
    output: Annotated[Path, typer.Option("--output", "-o", help="MP4 to write.")] = Path("out.mp4"),
    server: ServerOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Write everything a session has shown so far."""
    with _friendly(), _about(session), _client(server, data_dir) as client:
        client.save_video(session, output)
        console.print(f"{output}: {client.session(session).next_chunk * CHUNK_FRAMES} frames", highlight=False)


@sessions_app.command("rm")
def remove_sessions(
    sessions: Annotated[list[str], typer.Argument(help="Ids of sessions.")],
    server: ServerOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Drop sessions with everything they hold."""
    with _friendly(), _client(server, data_dir) as client:
        for session in sessions:
            with _about(session):
                client.delete(session)
            console.print(f"dropped {session}")


@sessions_app.command("verify")
def verify_session(
    session: Annotated[str, typer.Argument(help="Id of a session.")],
    state_url: Annotated[str | None, typer.Option(help="URL of the session store that has it.")] = None,
    data_dir: DataDirOption = None,
    model: Annotated[str | None, typer.Option(help="Model to replay it with; its own when left out.")] = None,
) -> None:
    """Check a session where it is kept, without a server: its blobs, its log, its snapshots, and a whole replay."""
    from longtake.server.verify_cli import run_verify

    with _friendly(), _about(session):
        well = run_verify(session, state_url, data_dir, model, console)
    if not well:
        raise typer.Exit(1)


@contextmanager
def _client(server: str | None, data_dir: Path | None) -> Iterator[Client]:
    api_key = os.environ.get(API_KEY_VARIABLE)
    if server is not None:
        with Client(server, api_key=api_key, retry=Retry(attempts=1)) as first:
            first.models()  # a wrong address or key fails at once; what fails later is tried again
        with Client(server, api_key=api_key) as client:
            yield client
        return
    with (
        console.status("starting a server") as status,
        private_server(data_dir, api_key=api_key) as private,
        Client(private.url, api_key=api_key) as client,
    ):
        status.stop()
        yield client


def _nothing_there(server: str | None, data_dir: Path | None) -> str:
    """Where a listing looked that has found nothing, and what it would not have seen there."""
    if server is not None:
        where = f"at {server}"
    elif data_dir is not None:
        where = f"in {data_dir}"
    else:
        settings = Settings()
        where = f"in {settings.data_dir}" if settings.state_url is None else "in the store of LONGTAKE_STATE_URL"
    if os.environ.get(API_KEY_VARIABLE):
        return f"no sessions {where} of the key in {API_KEY_VARIABLE}; those of other keys or none are not shown"
    return f"no sessions {where}; {API_KEY_VARIABLE} is unset, so those that belong to a key are not shown"


@contextmanager
def _about(session: str | None) -> Iterator[None]:
    """Where there is no such session, name it: a server repeats no input."""
    try:
        yield
    except (ServerProblem, ProblemError) as error:
        if session is None or error.code != "session_not_found":
            raise
        fail(f"there is no such session: {session} [session_not_found]", error)


@contextmanager
def _friendly(out: Console = errors) -> Iterator[None]:
    """Expected failures end the command with one line instead of a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        out.print("interrupted: what was committed is kept")
        raise typer.Exit(130) from None
    except ValidationError as error:
        first = error.errors()[0]
        fail(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", error, out)
    except httpx.UnsupportedProtocol as error:
        fail("give a server as a URL: http://127.0.0.1:8000", error, out)
    except httpx.ConnectError as error:
        fail(f"no server answers at {error.request.url.copy_with(path='')}: {error}", error, out)
    except (OSError, ProblemError) as error:
        fail(reason(error), error, out)
    except ServerProblem as error:
        key_wanted = f"set {API_KEY_VARIABLE} to one of the server's keys [unauthorized]"
        fail(key_wanted if error.code == "unauthorized" else str(error), error, out)
    except (ReplayError, ServerDiedError, StartError, httpx.HTTPError) as error:
        fail(str(error), error, out)


def main() -> None:
    """Entry point."""
    # before torch is loaded: threads that spin while they wait take the cores of every other process
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    app()
