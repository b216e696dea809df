"""The `sglang-dsv4` command."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

from sglang_dsv4 import __version__
from sglang_dsv4.console import INTERRUPTED, id_range, positive, tolerance
from sglang_dsv4.serving import Client, Launch, Server, ServerError, exit_on_signals, reserve_port

FAILED, UNUSABLE = 1, 2  # exit codes: a check failed; it could not be run

PACKAGE = Path(__file__).resolve().parent


def trace_folder() -> Path:
    """The recorded sessions: beside the package once installed, in bench/ in a source tree."""
    installed = PACKAGE / "trace_data"
    return installed if installed.is_dir() else PACKAGE.parent / "bench" / "traces"


def _scale(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens per block in (0, 64]")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-dsv4", description="DeepSeek-V4 in SGLang: pages and slots.")
    parser.add_argument("--version", action="version", version=f"sglang-dsv4 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("check", help="check this installation: SGLang, hooks, device")

    verify = commands.add_parser("verify", help="check a running server: warm answers equal cold ones")
    verify.add_argument("--url", required=True, help="http://HOST:PORT of a server of your own: its cache is flushed")
    verify.add_argument("--api-key", help="the server's --api-key")
    verify.add_argument(
        "--tolerance",
        type=tolerance,
        help="largest accepted logprob difference; default: 0 from a CPU server, 0.1 from others",
    )
    verify.add_argument("--copies", type=positive, default=8, help="concurrent copies of one prompt (default 8)")
    verify.add_argument("--any-hit", action="store_true", help="accept any hit, however short of what is promised")
    verify.add_argument("--token-ids", type=id_range, metavar="LOW:HIGH", help="ordinary ids to make prompts of")

    for name, text in (("demo", "replay recorded chats, warm and cold"), ("serve", "leave a server running")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--model", type=Path, help="checkpoint folder; default: write the tiny one")
        command.add_argument("--port", type=int, help="default: 30000 to serve, any free one to demo")
        log = f"{tempfile.gettempdir()}/sglang-dsv4-PORT.log"
        command.add_argument("--log", type=Path, help=f"the server's output; default: {log}")
        command.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
        command.add_argument(
            "--server-args",
            type=shlex.split,
            default=[],
            metavar="'ARGS'",
            help="more flags for SGLang, quoted",
        )
        if name == "demo":
            command.add_argument("--url", help="use this running server; its cache is flushed")
            command.add_argument("--token-ids", type=id_range, metavar="LOW:HIGH", help="ordinary token ids")
            command.add_argument("--traces", type=Path, default=trace_folder(), help="folder of trace_*.json")
            command.add_argument("--sessions", type=positive, default=8)
            command.add_argument("--turns", type=positive, default=4)
            command.add_argument("--scale", type=_scale, default=Fraction(1, 4), help="tokens per block (default 1/4)")
    return parser


def _check(args: argparse.Namespace) -> int:
    from sglang_dsv4 import check

    return FAILED if check.report() else 0


def _verify(args: argparse.Namespace) -> int:
    from sglang_dsv4.verify import verify

    client = Client(args.url, api_key=args.api_key)
    passed = verify(
        client,
        words=client.words(args.token_ids),
        tolerance=args.tolerance,
        copies=args.copies,
        any_hit=args.any_hit,
    )
    return 0 if passed else FAILED


@contextmanager
def _server(args: argparse.Namespace, port: int | None) -> Iterator[Server]:
    """A server for the checkpoint of the arguments; a tiny one is written where none is named."""
    exit_on_signals()
    if port is not None:
        reserve_port(port).close()  # told before a checkpoint is written
    with tempfile.TemporaryDirectory(prefix="sglang-dsv4-") as scratch:
        model = args.model
        if model is None:
            model = Path(scratch) / "tiny"
            importlib.import_module("sglang_dsv4.tiny").write_checkpoint(model)
        launch = Launch(model, device=args.device, extra_args=tuple(args.server_args))
        # Not inside `scratch`: an error message sends the user to the log when that is gone.
        log = args.log or Path(tempfile.gettempdir()) / f"sglang-dsv4-{port or f'process-{os.getpid()}'}.log"
        with Server(launch, log, port=port, starting=_say_command) as server:
            print(f"ready: {server.url} (log: {log})", flush=True)
            yield server


def _say_command(command: Sequence[str]) -> None:
    print(f"starting: python {shlex.join(command[1:])}", flush=True)


def _demo(args: argparse.Namespace) -> int:
    from sglang_dsv4 import demo

    sessions = demo.load_sessions(args.traces, turns=args.turns, count=args.sessions, tokens_per_block=args.scale)
    if args.url:
        client = Client(args.url)
        outcome = demo.run(client, sessions, client.words(args.token_ids))
    else:
        with _server(args, args.port) as server:
            outcome = demo.run(server.client, sessions, server.client.words(args.token_ids))
    print(outcome.last_line())
    return 0 if outcome.ok else FAILED


def _serve(args: argparse.Namespace) -> int:
    with _server(args, 30000 if args.port is None else args.port) as server:
        print(chat_command(server.url))
        print("stop with Ctrl-C", flush=True)
        try:
            code = server.process.wait()
        except KeyboardInterrupt:
            return 0
        print(f"sglang-dsv4: the server ended by itself: {server.last_words()}", file=sys.stderr)
        return code or FAILED


def chat_command(url: str) -> str:
    """A shell command that has a chat with the server."""
    body = '{"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}'
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    run = {"check": _check, "verify": _verify, "demo": _demo, "serve": _serve}[args.command]
    try:
        return run(args)
    except ServerError as error:
        print(f"sglang-dsv4: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("sglang-dsv4: stopped", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
