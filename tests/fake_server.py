"""A stand-in for an SGLang server: answers are a hash of the prompt, the cache is a set of prefixes.

`fault` breaks one thing, so that a test can show who notices.
"""

from __future__ import annotations

import json
import threading
from contextlib import closing
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from sglang_dsv4.ports import reserve

PAGE = 128


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with closing(reserve()) as found:
        return found.port


class FakeServer:
    """A context manager; `url` is where it listens. Faults are the strings compared below."""

    def __init__(self, fault: str = "", *, page: int = PAGE, device: str = "cpu", max_prompt: int = 4000) -> None:
        self.fault, self.page, self.device, self.max_prompt = fault, page, device, max_prompt
        self.snapshots: set[tuple[int, ...]] = set()
        self.stored: list[tuple[int, ...]] = []
        self.flushes = 0
        self.lock = threading.Lock()
        self.asked, self.ends = threading.Event(), threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ends.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def flush(self) -> int:
        self.flushes += 1
        if self.fault == "refuses to flush":
            return 400
        if self.fault != "flush does nothing":
            self.snapshots.clear()
            self.stored.clear()
        return 200

    def info(self) -> dict[str, Any]:
        if self.fault == "another program":
            return {"hello": "world"}
        return {
            "model_path": "model",
            "page_size": 0 if self.fault == "pages of nothing" else self.page,
            "device": self.device,
            "version": "0.5.23",
            "max_req_input_len": self.max_prompt,
            "disable_radix_cache": self.fault == "no radix cache",
        }

    def generate(self, ids: tuple[int, ...], count: int) -> dict[str, Any]:
        with self.lock:
            ends = range(0, len(ids), self.page)
            cached = max(end for end in ends if end == 0 or ids[:end] in self.snapshots)
            if self.fault == "nothing is cached":
                cached = 0
            answer = [_draw(ids, i, 1 << 16) for i in range(count)]
            self._keep(ids, cached, answer)
        logprobs = [-_draw(ids, i, 1000) / 1000 for i in range(count)]
        if cached and self.fault == "other tokens after a hit":
            answer[-1] += 1
        if cached and self.fault == "other logprobs after a hit":
            logprobs[-1] -= 0.001
        if cached and self.fault == "NaN after a hit":
            logprobs[-1] = float("nan")
        if self.fault == "ends early":
            answer.pop()
        meta = {
            "prompt_tokens": len(ids),
            "cached_tokens": cached,
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, answer, strict=False)],
            "output_top_logprobs": [[[v, 0, None], [v - 0.01, 1, None]] for v in logprobs],
        }
        if self.fault == "no cache report":
            del meta["cached_tokens"]
        return {"output_ids": answer, "meta_info": meta}

    def _keep(self, ids: tuple[int, ...], cached: int, answer: list[int]) -> None:
        whole = (*ids, *answer)
        last = 0 if self.fault == "aligned repeats miss" else 1
        self.snapshots.add(ids[: (len(ids) - last) // self.page * self.page])
        if self.fault != "answers leave nothing":
            self.snapshots.add(whole[: (len(whole) - 1) // self.page * self.page])
        if self.fault != "branches leave nothing":
            for other in self.stored:
                common = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), 0)
                self.snapshots.add(ids[: common // self.page * self.page])
        self.stored.append(whole)


def _draw(ids: tuple[int, ...], index: int, below: int) -> int:
    return int.from_bytes(sha256(repr((ids, index)).encode()).digest()[:8]) % below


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def _reply(self, code: int, body: str) -> None:
            self.send_response(code)
            raw = body.encode(errors="surrogateescape")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def _cut(self, body: str) -> None:
            """A chunk of a stream whose server is killed behind it."""
            self.protocol_version = "HTTP/1.1"
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(body.encode()), body.encode()))
            self.close_connection = True

        def do_GET(self) -> None:
            if server.fault == "a web page":
                self._reply(200, "<html>welcome</html>")
            elif self.path == "/server_info":
                self._reply(200, json.dumps(server.info()))
            else:
                self._reply(200, "")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.startswith("/flush_cache"):
                self._reply(server.flush(), "busy")
            elif self.path == "/tokenize":
                if server.fault == "no tokenizer":
                    self._reply(500, "no tokenizer")
                else:
                    self._reply(200, json.dumps({"tokens": list(range(300, 360))}))
            else:
                server.asked.set()
                if server.fault == "never answers":
                    server.ends.wait()
                count = body["sampling_params"]["max_new_tokens"]
                answer = server.generate(tuple(body["input_ids"]), count)
                if server.fault == "an error in the stream":
                    answer = {"error": {"message": "out of\nmemory"}}
                if server.fault == "an endless prompt":
                    answer["meta_info"]["prompt_tokens"] = float("inf")
                if server.fault == "a full queue":
                    reason = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
                    answer = {"output_ids": [], "meta_info": {"prompt_tokens": 0, "finish_reason": reason}}
                if server.fault == "a number of ids":
                    answer["output_ids"] = 5
                if server.fault == "no numbers in the logprobs":
                    answer["meta_info"]["output_token_logprobs"] = [["x"]] * count
                event = {"a list in the stream": "[1]", "bytes in the stream": "\udcff"}.get(server.fault)
                said = f"data: {event or json.dumps(answer)}\n\n"
                if server.fault == "cut off":
                    self._cut(said)
                else:
                    self._reply(200, f"{said}data: [DONE]\n\n")

    return Handler
