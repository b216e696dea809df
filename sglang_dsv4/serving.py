"""A server to talk to: starting one, stopping it, and a small HTTP client.

Used by `demo`, `serve`, `verify` and the tests. Standard library only: `verify` runs on a machine that has
neither torch nor SGLang. Everything that can go wrong outside this process is a `ServerError` of one line.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import random
import re
import signal
import string
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from sglang_dsv4.console import FEWEST_IDS
from sglang_dsv4.ports import PortTaken, Reservation, reserve
from sglang_dsv4.workers import Workers

PARSER = "dsv4_slot"
READY_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 600.0
_TELLING = re.compile(r"^sglang-dsv4: |Scheduler hit an exception: |^(\w+\.)*\w*(Error|Exception): ")
# uvicorn's, and that of the store through which SGLang's ranks find each other.
_TAKEN = re.compile(r"\[Errno 98\]|EADDRINUSE|[Aa]ddress already in use")
STARTS = 3  # of one server, each on other ports, where another process takes them


class ServerError(RuntimeError):
    """The server or its address cannot do what was asked. One line: what, why, what to do."""


@dataclass(frozen=True)
class ServerInfo:
    """What a running server says about itself."""

    model_path: str
    page_size: int
    device: str
    version: str
    max_prompt: int
    radix_cache: bool


@dataclass(frozen=True)
class Answer:
    """One finished greedy request.

    logprobs[i] belongs to output_ids[i]; runner_up[i] is the second-best logprob at that position (empty
    where the server was not asked). Times are seconds from sending: first_token_s to the first token's
    arrival; arrivals are (time, tokens so far) of every event that brought tokens.
    """

    prompt_tokens: int
    cached_tokens: int
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    runner_up: tuple[float, ...]
    first_token_s: float
    total_s: float
    arrivals: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class Words:
    """Deterministic token ids: equal keys give equal ids, on every machine and in every process."""

    ids: tuple[int, ...]

    def draw(self, key: str, count: int) -> list[int]:
        rng = random.Random(key)
        return [self.ids[rng.randrange(len(self.ids))] for _ in range(count)]


class Client:
    """Talks to one server. Safe to use from several threads: each call is its own connection."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = REQUEST_TIMEOUT_S) -> None:
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            (parts.hostname or "").encode("idna")
        except ValueError:  # brackets that do not close, a port that is no number, a name that no host can have
            valid = False
        if not valid or " " in url:
            raise ServerError(f"{url!r} is not a server's address: expected http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        # The address is the user's own and often a loopback one: no proxy from the environment. One opener for all
        # requests, because making one reads the machine's certificates.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ServerError("the API key has characters that no HTTP header carries")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def settings(self) -> dict[str, Any]:
        """Every field of SGLang's arguments as they were resolved, and its live state."""
        raw: dict[str, Any] = json.loads(self._send("/server_info", timeout=30))
        return raw

    def info(self) -> ServerInfo:
        """Raises ServerError where nothing answers or what answers is not SGLang."""
        try:
            raw = self.settings()
            if int(raw["page_size"]) < 1:
                raise ValueError(f"page_size {raw['page_size']}")
            return ServerInfo(
                model_path=str(raw["model_path"]),
                page_size=int(raw["page_size"]),
                device=str(raw["device"]),
                version=str(raw["version"]),
                max_prompt=int(raw["max_req_input_len"]),
                radix_cache=not raw["disable_radix_cache"],
            )
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.url} answers, but not as SGLang does (/server_info: {error!r}); "
                "give the address of an SGLang server"
            ) from None

    def ready(self) -> bool:
        """Whether the server has finished starting."""
        try:
            self._send("/health", timeout=5)
        except ServerError:
            return False
        return True

    def words(self, id_range: tuple[int, int] | None = None) -> Words:
        """Ordinary token ids of the served model: from its own tokenizer, or [low, high) where given."""
        self.info()  # an address without SGLang is told as that
        if id_range is not None:
            return Words(tuple(range(*id_range)))
        letters = string.ascii_letters + string.digits
        text = " ".join([*letters, letters, "the quick brown fox jumps over the lazy dog while it rains"])
        body = {"prompt": text, "add_special_tokens": False}
        try:
            ids = sorted(set(json.loads(self._send("/tokenize", body))["tokens"]))
        except (ServerError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ServerError(
                f"{self.url} does not tokenize ({error}); name ordinary token ids with --token-ids LOW:HIGH"
            ) from None
        if len(ids) < FEWEST_IDS:
            raise ServerError(
                f"{self.url} makes only {len(ids)} distinct tokens of plain text; "
                "name ordinary token ids with --token-ids LOW:HIGH"
            )
        return Words(tuple(ids))

    def generate(self, input_ids: Sequence[int], max_new_tokens: int, *, logprobs: bool = True) -> Answer:
        """One greedy request that ignores end-of-sentence tokens, streamed."""
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
            "stream": True,
        }
        if logprobs:
            body |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 2}
        start = time.perf_counter()
        arrivals: list[tuple[float, int]] = []
        last: dict[str, Any] = {}
        for event in self._events("/generate", body):
            if "error" in event:
                error = event["error"]
                text = error.get("message", error) if isinstance(error, dict) else error
                raise ServerError(f"{self.url} refused a request: {_one_line(text)}")
            ids_so_far = event.get("output_ids") or ()
            if not isinstance(ids_so_far, Sequence):
                raise ServerError(f"{self.url} sent an event whose output_ids are no list: {_one_line(event)}")
            tokens = len(ids_so_far)
            if tokens > (arrivals[-1][1] if arrivals else 0):
                arrivals.append((time.perf_counter() - start, tokens))
            last = event
        total = time.perf_counter() - start
        try:
            meta = last["meta_info"]
            reason = meta.get("finish_reason") or {}
            if isinstance(reason, dict) and reason.get("type") == "abort":
                raise ServerError(f"{self.url} aborted a request: {_one_line(reason.get('message') or reason)}")
            ids = tuple(int(i) for i in last["output_ids"])
            if "cached_tokens" not in meta:
                raise ServerError(f"{self.url} does not report cached tokens; its cache cannot be checked")
            if len(ids) != max_new_tokens:
                ended = f"ended a request after {len(ids)} of {max_new_tokens} tokens"
                raise ServerError(f"{self.url} {ended}: {_one_line(reason)}")
            return Answer(
                prompt_tokens=int(meta["prompt_tokens"]),
                cached_tokens=int(meta["cached_tokens"]),
                output_ids=ids,
                logprobs=tuple(float(p[0]) for p in meta.get("output_token_logprobs") or ()),
                runner_up=tuple(float(p[1][0]) for p in meta.get("output_top_logprobs") or ()),
                first_token_s=arrivals[0][0] if arrivals else total,
                total_s=total,
                arrivals=tuple(arrivals),
            )
        except KeyError as error:
            raise ServerError(f"{self.url} sent an answer without {error}") from None
        except (TypeError, ValueError, OverflowError, IndexError, AttributeError) as error:
            raise ServerError(f"{self.url} sent an answer that cannot be read: {_one_line(error)}") from None

    def generate_together(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], *, logprobs: bool = True
    ) -> list[Answer]:
        """The prompts as concurrent requests, answers in the order of the prompts."""

        def one(ids: Sequence[int], limit: int) -> Answer:
            return self.generate(ids, limit, logprobs=logprobs)

        with Workers(max(1, len(prompts))) as pool:
            return pool.gather(one, prompts, max_new_tokens)

    def flush(self, *, patience_s: float = 60.0) -> None:
        """Empty the server's cache, waiting for it to fall idle."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._send("/flush_cache?timeout=10", {})
                return
            except ServerError as error:
                if not self.ready() or time.monotonic() > deadline:
                    raise ServerError(f"{self.url} does not flush its cache: {error}") from None
                time.sleep(0.2)

    def abort_all(self) -> None:
        """Abort every running and waiting request."""
        self._send("/abort_request", {"abort_all": True}, timeout=30)

    def start_profile(self, folder: Path, steps: int) -> None:
        """Have the server write a trace of the kernels of its next `steps` forward steps to `folder`."""
        self._send("/start_profile", {"output_dir": str(folder), "num_steps": steps, "activities": ["GPU"]})

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST JSON, return the decoded answer."""
        return json.loads(self._send(path, body))

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
        response: http.client.HTTPResponse = self._opener.open(request, timeout=timeout)
        return response

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except urllib.error.HTTPError as error:
            try:
                detail = _one_line(error.read(2000).decode(errors="replace"))
            except (http.client.HTTPException, OSError) as broken:
                detail = f"and broke the connection ({broken!r})"
            raise ServerError(f"{error.url} answered {error.code}: {detail}") from None
        except TimeoutError:
            raise ServerError(f"{self.url} did not answer in time") from None
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            raise ServerError(f"no server at {self.url} ({reason}); start one or correct --url") from None
        except (http.client.HTTPException, OSError) as error:
            raise ServerError(f"{self.url} broke the connection ({error!r})") from None

    def _send(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> str:
        with self._errors(), self._open(path, body, timeout or self.timeout) as response:
            return response.read().decode(errors="replace")

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream. Raises ServerError where it breaks off: what is read of one
        that was cut ends like a whole one, but for its mark."""
        with self._errors(), self._open(path, body, self.timeout) as response:
            for raw in response:
                line = raw.decode(errors="replace").strip()
                if line == "data: [DONE]":
                    return
                if not line.startswith("data:"):
                    continue
                try:
                    event = json.loads(line.removeprefix("data:"))
                except json.JSONDecodeError:
                    raise ServerError(f"{self.url} sent an event without JSON: {_one_line(line)}") from None
                if not isinstance(event, dict):
                    raise ServerError(f"{self.url} sent an event that is no object: {_one_line(line)}")
                yield event
            raise ServerError(f"{self.url} broke the connection in the middle of an answer")


def _one_line(value: object, limit: int = 300) -> str:
    return " ".join(str(value).split())[:limit]


def reserve_port(port: int) -> Reservation:
    """That port, kept from other starts. Raises ServerError where no server can be started on it."""
    if not 0 < port < 65536:
        raise ServerError(f"{port} is not a port: use 1 to 65535")
    try:
        return Reservation(port)
    except PortTaken as error:
        raise ServerError(f"port {port} cannot be used ({error.strerror}): name another with --port") from None


@dataclass(frozen=True)
class Launch:
    """How to start a server for one checkpoint.

    The three limits are always passed: without them SGLang sizes its pools from all memory of the machine,
    which on one without a GPU is the memory that everything else lives in.

    plugin  False serves with SGLang's own cache: no parser of ours, no slots
    """

    model: Path
    device: str = "cpu"
    max_total_tokens: int = 32768
    max_running_requests: int = 16
    max_mamba_cache_size: int = 256
    chunked_prefill_size: int = 512
    extra_args: tuple[str, ...] = ()
    plugin: bool = True

    def command(self, port: int, group_port: int) -> list[str]:
        """What to run: a server on `port`, whose ranks find each other on `group_port`."""
        parser = ("--model-config-parser", PARSER) if self.plugin else ()
        slots = ("--max-mamba-cache-size", str(self.max_mamba_cache_size)) if self.plugin else ()
        return [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(self.model)),
            *parser,
            *("--device", self.device),
            *("--host", "127.0.0.1", "--port", str(port), "--nccl-port", str(group_port)),
            *("--max-total-tokens", str(self.max_total_tokens)),
            *("--max-running-requests", str(self.max_running_requests)),
            *slots,
            *("--chunked-prefill-size", str(self.chunked_prefill_size)),
            "--enable-cache-report",
            "--sleep-on-idle",  # an idle scheduler would otherwise keep one core busy with polling
            *self.extra_args,
        ]

    def environment(self) -> dict[str, str]:
        env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.device == "cpu":
            # One thread a process: decode steps are small, and SGLang's processes would fight over the cores.
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return env

    def check(self) -> None:
        """Raises ServerError where this cannot work, before a process is started."""
        if importlib.util.find_spec("sglang") is None:
            raise ServerError("SGLang is not installed: run this through `make`, or see `sglang-dsv4 check`")
        if self.device == "cpu" and importlib.util.find_spec("sgl_kernel") is None:
            raise ServerError(
                "SGLang cannot run without a GPU here: its sgl_kernel is missing; run this through `make`, "
                "which puts tools/cpu_shim on PYTHONPATH"
            )
        if not (self.model / "config.json").is_file():
            raise ServerError(f"{self.model} holds no checkpoint: config.json is missing")


class Server:
    """A server subprocess with its own process group; a context manager that ends it.

    `launch.command(port, group port)` is run with stdout and stderr in `log`. Another process may take a port before
    SGLang binds it, which leaves SGLang running without listening. That is read off the log, and the server is started
    again on other ports, up to STARTS times; a port that the caller named is not replaced.
    """

    def __init__(
        self,
        launch: Launch,
        log: Path,
        *,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = READY_TIMEOUT_S,
        waiting: Callable[[float], None] | None = None,
        starting: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """Returns when the server is ready. `waiting(seconds)` is called about once a second until then.

        `starting` is told the command of every start. `timeout` (seconds) bounds all starts together.
        Raises ServerError.
        """
        launch.check()
        self.launch = launch
        self.log = log
        self._env = dict(env or {})
        self._starting = starting
        self._process: subprocess.Popen[bytes] | None = None
        self._reservations = contextlib.ExitStack()
        deadline = time.monotonic() + timeout
        for attempt in range(1, STARTS + 1):
            try:
                self._start(port)
                self._wait_ready(deadline, timeout, waiting)
                return
            except _PortLost as lost:
                self.stop()
                if port is not None or attempt == STARTS:
                    tried = "" if attempt == 1 else f", {attempt} times in a row"
                    again = "try again" if port is None else "name another with --port"
                    what = f"another process took a port while the server started{tried}"
                    raise ServerError(f"{what} ({lost}): {again} (log: {log})") from None
            except BaseException:
                self.stop()
                raise

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    def _start(self, port: int | None) -> None:
        """One process on `port`, or on one of its own choice."""
        with contextlib.ExitStack() as kept:
            held = [_reserve() if port is None else reserve_port(port), _reserve()]
            for reservation in held:
                kept.callback(reservation.close)
            self.port = held[0].port
            self.url = f"http://127.0.0.1:{self.port}"
            self.client = Client(self.url)
            command = self.launch.command(self.port, held[1].port)
            with _opened(self.log) as out:
                if self._starting:
                    self._starting(command)
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self.launch.environment(), **self._env},
                    start_new_session=True,
                )
            self._reservations = kept.pop_all()

    def _wait_ready(self, deadline: float, timeout: float, waiting: Callable[[float], None] | None) -> None:
        start = time.monotonic()
        while True:
            ready = self.client.ready()
            # Asked first: whoever took the port may answer in this server's place.
            if lost := self._lost_port():
                raise _PortLost(lost)
            if ready:
                return
            if self.process.poll() is not None:
                if lost := self._lost_port():  # written since
                    raise _PortLost(lost)
                raise ServerError(f"the server did not start: {self.last_words()} (log: {self.log})")
            if time.monotonic() > deadline:
                raise ServerError(f"the server was not ready after {timeout:.0f} s (log: {self.log})")
            if waiting:
                waiting(time.monotonic() - start)
            time.sleep(1.0)

    def _lost_port(self) -> str | None:
        """The log's line that says a port could not be bound."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((_one_line(line) for line in lines if _TAKEN.search(line)), None)

    def last_words(self) -> str:
        """The last line of the log that names an error, or else the last line."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if _TELLING.search(line)]
        return _one_line((telling or lines or ["it wrote nothing"])[-1])

    def stop(self, patience_s: float = 20.0) -> None:
        """End the server and every process it started. Does nothing the second time, and nothing before a start."""
        if self._process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            deadline = time.monotonic() + patience_s
            while _group_alive(self.process) and time.monotonic() < deadline:
                time.sleep(0.1)
        self.process.wait()
        self._reservations.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def exit_on_signals() -> None:
    """From now on SIGTERM and SIGHUP end this process as `sys.exit` does, so that the servers it started end, too."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))


class _PortLost(Exception):
    """A port was taken between its choice and its use; the message is the log's line."""


def _reserve() -> Reservation:
    try:
        return reserve()
    except PortTaken as error:
        raise ServerError(f"{error.strerror}: end other servers, or name a port with --port") from None


def _opened(log: Path) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("wb")
    except OSError as error:
        what = f"cannot write the server's log to {log} ({error.strerror})"
        raise ServerError(f"{what}: name another file with --log") from None


def _group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reaps the leader, whose group id would otherwise stay taken
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
